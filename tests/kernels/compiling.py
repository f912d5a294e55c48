"""Compiles the kernels for GPUs that are not here, and reads what they would need there.

Only in a process without TRITON_INTERPRET, which is read when a kernel is decorated.
"""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path

import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from linearize.kernels.configs import choose

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 166912, "sm_90": 232448, "gfx942": 65536}  # that one program may use
KERNELS = {  # operation: (module, function, row of the table)
    "state": ("state", "state_forward", "state"),
    "out": ("out", "output_forward", "out"),
    "state_backward": ("state", "state_backward", "state"),
    "queries_backward": ("backward", "queries_backward", "queries"),
    "rows_backward": ("backward", "rows_backward", "rows"),
    "keys_backward": ("backward", "keys_backward", "keys"),
    "sinks_backward": ("backward", "sinks_backward", "sinks"),
    "features_backward": ("backward", "features_backward", "features"),
}
WIDE = set("S0 Z0 HZ S1 Z1 SCALE BETA ALPHA M LSE DEN DELTA E DS1 DZ1 DHZ DS0 DZ0 DV_ Y_".split())
TENSOR_CORES = {"sm_80": "mma.sync", "sm_90": r"wgmma.mma_async|mma.sync", "gfx942": "v_mfma"}


def argument_type(name, kernel, narrow):
    """The type of an argument that is not a constant."""
    if name == "SEEN":
        return "*i64"
    if name == "BEST":
        return "*i32"
    if name in WIDE or (kernel == "sinks_backward" and name == "DK"):
        return "*fp32"
    if name == "scaling":
        return "fp32"
    return f"*{narrow}" if name.isupper() and name not in ("T", "L") else "i32"


def compiled(kernel, arch, *, D, F, W, N=4, H=32, G=8, HS=8, narrow="bf16", C=64, **overrides):
    """The compiled kernel for one architecture and shape; overrides replace the table's."""
    module, function, operation = KERNELS[kernel]
    function = getattr(importlib.import_module(f"linearize.kernels.{module}"), function)
    like = type("Like", (), {"dtype": getattr(__import__("torch"), {"bf16": "bfloat16"}[narrow])})
    meta = choose(operation, like, F=F, DV=D, D=D, N=N, arch=arch).meta | overrides
    options = {key: meta.pop(key) for key in ("num_warps", "num_stages")}
    shape = dict(H=H, G=G, HS=HS, D=D, DV=D, F=F, C=C, W=W, P=W - 1, N=N, SCALED=True, SAVE=True)
    constants = {p.name: (shape | meta | {"PREC": "ieee"}).get(p.name) for p in function.params}
    constants = {name: value for name, value in constants.items() if value is not None}
    signature = {
        p.name: "constexpr" if p.name in constants else argument_type(p.name, kernel, narrow)
        for p in function.params
    }
    # as at a launch with aligned tensors: without the hints loads are scalar
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind[0] == "*" or name[1:] in ("_b", "_h", "_t")
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
