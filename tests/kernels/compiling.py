"""Compiles the kernels for GPUs that are not here, and reads what they would need there.

    python tests/kernels/compiling.py [part of a name]     writes budgets.json

Only in a process without TRITON_INTERPRET, which is read when a kernel is decorated.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from linearize.kernels.configs import CHUNK, choose, padded

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton 3.9 does, and warns about
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "gfx942": 65536}  # that one program may use
SHAPE = dict(H=32, G=8, N=4)
KERNELS = {  # operation: (module, function, row of the table)
    "state": ("state", "state_forward", "state"),
    "out": ("out", "output_forward", "out"),
    "state_backward": ("state", "state_backward", "state"),
    "queries_backward": ("backward", "queries_backward", "queries"),
    "rows_backward": ("backward", "rows_backward", "rows"),
    "keys_backward": ("backward", "keys_backward", "keys"),
    "sinks_backward": ("backward", "sinks_backward", "sinks"),
    "features_backward": ("backward", "features_backward", "features"),
    "step": ("decode", "step_forward", "step"),
}
WIDE = (  # fp32 tensors
    *("S", "Z", "S0", "Z0", "HZ", "S1", "Z1", "DS1", "DZ1", "DHZ", "DS0", "DZ0", "SCALE", "BETA"),
    *("ALPHA", "M", "LSE", "DEN", "DELTA", "E", "Y_", "DV_", "MQ", "MK", "BIAS_Q", "BIAS_K"),
)
TENSOR_CORES = {"sm_80": "mma.sync", "sm_90": r"wgmma.mma_async|mma.sync", "gfx942": "v_mfma"}


def names():
    """The kernels with W = 64 and 128 features: all on sm_90, elsewhere the larger heads."""
    return [
        f"{arch} {kernel} D{D}"
        for arch in TARGETS
        for D in ((64, 128) if arch == "sm_90" else (128,))
        for kernel in KERNELS
    ]


def measured(kernel, arch, D):
    """The figures of one of `names`."""
    return figures(compiled(kernel, arch, D=D, F=128, W=64), arch)


def argument_type(name, kernel):
    """The type of an argument that is not a constant."""
    if name == "SEEN":
        return "*i64"
    if name == "BEST":
        return "*i32"
    if name in WIDE or (kernel == "sinks_backward" and name == "DK"):
        return "*fp32"
    if name == "scaling":
        return "fp32"
    return "*bf16" if name.isupper() and name not in ("T", "L") else "i32"


def compiled(kernel, arch, *, D, F, W, HS=8, **overrides):
    """The compiled kernel for bf16 inputs, one architecture and one shape; overrides replace the
    table's tiles and options. For `step`, F is the size of the map's projection.
    """
    module, function, operation = KERNELS[kernel]
    function = getattr(importlib.import_module(f"linearize.kernels.{module}"), function)
    like = torch.empty(0, dtype=torch.bfloat16)
    meta = choose(operation, like, F=F, DV=D, D=D, N=SHAPE["N"], arch=arch).meta | overrides
    options = {key: meta.pop(key) for key in ("num_warps", "num_stages")}
    constants = SHAPE | meta | dict(
        HS=HS, D=D, DV=D, F=F, f=F, C=CHUNK, W=W, P=W - 1, RP=padded(SHAPE["H"] // HS),
        SCALED=True, SAVE=True, HALVES=1, PREC="ieee",
        PREC_STATE="ieee" if arch == "gfx942" else "tf32x3",
    )  # fmt: skip
    constants = {p.name: constants[p.name] for p in function.params if p.name in constants}
    signature = {
        p.name: "constexpr" if p.name in constants else argument_type(p.name, kernel)
        for p in function.params
    }
    # as at a launch with aligned tensors: without the hints loads are scalar
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or name[1:] in ("_b", "_h", "_g", "_t")
    }
    source = triton.compiler.ASTSource(
        fn=function, signature=signature, constexprs=constants, attrs=aligned
    )
    return triton.compile(source, target=TARGETS[arch], options=options)


def figures(binary, arch):
    """{registers, stack, spills, shared, tensor_cores} of a compiled kernel."""
    if arch == "gfx942":
        text = binary.asm["amdgcn"]
        number = {
            key: int(re.search(rf"\.{key}:\s*(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        }
        found = dict(registers=number["vgpr_count"], spills=number["vgpr_spill_count"] * 4)
    else:
        text = binary.asm["ptx"]
        found = _ptxas(text, arch)
    cores = len(re.findall(TENSOR_CORES[arch], text))
    return found | dict(shared=binary.metadata.shared, tensor_cores=cores)


def _ptxas(text, arch):
    """Registers and spilled bytes, from Triton's own ptxas: the plain one may be too old."""
    tool = get_ptxas(int(arch[3:]))
    tool = getattr(tool, "path", None) or tool[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(text)
        target = "sm_90a" if arch == "sm_90" else arch
        command = [tool, "-v", f"-arch={target}", "-o", f"{folder}/kernel.cubin", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", said).groups()
    )
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    return dict(registers=registers, spills=max(stores, loads), stack=stack)


if __name__ == "__main__":
    file = Path(__file__).parent / "budgets.json"
    budgets = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in names():
        if len(sys.argv) < 2 or sys.argv[1] in name:
            arch, kernel, size = name.split()
            budgets[name] = measured(kernel, arch, int(size[1:]))
            sys.stderr.write(f"{name} {budgets[name]}\n")
            ordered = {name: budgets[name] for name in names() if name in budgets}
            file.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")
