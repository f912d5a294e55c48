"""Proves the GPU kernels on the GPU that is here, then times them.

    python scripts/bench_gpu.py --output bench.json         needs torch, triton and transformers
    python scripts/bench_gpu.py --roofline                  bounds on paper, no GPU
    python scripts/bench_gpu.py --dry-run                   the same on a CPU, torch path, tiny

Correctness comes first: outputs, every gradient, the state and the step of each shape against the
definition in float64, and two runs against each other, bit for bit. If anything fails there are no
timings and the exit code is 1. Each section is written to the file when it is done; after --minutes
no new measurement starts. Baseline: torch's scaled_dot_product_attention, for the step with a full
static cache.
"""

import argparse
import copy
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from linearize.kernels.configs import architecture
from linearize.kernels.roofline import (
    DEVICES,
    Shape,
    break_even_tokens,
    prefill,
    seconds,
    softmax_prefill_flops,
    softmax_step_bytes,
    step_bytes,
)
from linearize.modeling.accelerated import step_in_place
from linearize.modeling.attention import LinearizedHeads
from linearize.modeling.chunked import hybrid_chunked
from linearize.modeling.configuration_linearized import LinearizeConfig
from linearize.modeling.ops import State, empty_state, hybrid_quadratic, hybrid_step

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
GRADIENT = {torch.float32: 5e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


class Layer:
    """One random attention layer and its inputs."""

    def __init__(self, device, *, B, T, H, G, D, feature_map, dtype, W=64, N=4, k_map="kv_head"):
        torch.manual_seed(0)
        geometry = dict(num_heads=H, num_key_value_heads=G, qk_dim=D, v_dim=D, scaling=D**-0.5)
        section = LinearizeConfig(
            base_model_type="llama", layers=[0], geometry={"0": geometry}, window=W, sinks=N,
            feature_map=feature_map, k_map=k_map,
        )  # fmt: skip
        self.heads = LinearizedHeads(section, 0, device)
        self.heads.reset_parameters()
        with torch.no_grad():
            for parameter in self.heads.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        self.op = self.heads.operator(scaling=D**-0.5)
        shape = dict(device=device, dtype=dtype)
        self.qkv = [torch.randn(B, n, T, D, **shape) for n in (H, G, G)]

    def start(self):
        return empty_state(self.op, *self.qkv, self.heads.feature_map_k.num_features)

    def double(self):
        """(op, inputs) with the same numbers in float64, as leaves."""
        heads = copy.deepcopy(self.heads).double()
        inputs = [x.double().requires_grad_() for x in self.qkv]
        return heads, heads.operator(scaling=self.op.scaling), inputs


def distance(a, b):
    """max |a - b| / max(1, max |b|)."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


def gradients(out, leaves):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((out.double() * direction.to(out.device).double()).sum(), leaves)


def errors(layer):
    """{what: distance to the definition} of outputs, gradients, and steps after a prefill."""
    inputs = [x.clone().requires_grad_() for x in layer.qkv]
    runs = []
    for _ in range(2):
        out = hybrid_chunked(layer.op, *inputs, layer.start())[0]
        runs.append([out, *gradients(out, [*inputs, *layer.heads.parameters()])])
    heads, op, wide = layer.double()
    expected = hybrid_quadratic(op, *wide).out
    wanted = [expected, *gradients(expected, [*wide, *heads.parameters()])]
    names = ["out", "dq", "dk", "dv", *("d" + n for n, _ in heads.named_parameters())]
    found = {name: distance(a, b) for name, a, b in zip(names, runs[0], wanted)}
    found["bitwise"] = float(not all(map(torch.equal, *runs)))
    with torch.no_grad():
        T = layer.qkv[0].shape[2] - 3
        before = [x[:, :, :T] for x in layer.qkv]
        state = State(*(x.clone() for x in hybrid_chunked(layer.op, *before, layer.start())[1]))
        for t in range(T, T + 3):
            token = [x[:, :, t : t + 1] for x in layer.qkv]
            out = step_in_place(layer.op, *token, state)
            if out is None:
                out, state = hybrid_step(layer.op, *token, state)
            found[f"step {t - T}"] = distance(out, expected[:, :, t : t + 1])
    return found


def check(device, tiny):
    """Rows of (case, errors, passed)."""
    sizes = [(16, 2, 1)] if tiny else [(64, 4, 2), (128, 8, 2), (80, 2, 2), (96, 4, 1)]
    dtypes = [torch.float32] if tiny else list(TOLERANCE)
    rows = []
    for (D, H, G), dtype, name, k_map, T in itertools.product(
        sizes, dtypes, ("hedgehog", "centroids"), ("kv_head", "q_head"), (70, 333)
    ):
        if k_map == "q_head" and (G == H or dtype == torch.float16):
            continue
        layer = Layer(device, B=2, T=T, H=H, G=G, D=D, feature_map=name, dtype=dtype, k_map=k_map)
        found = errors(layer)
        bounds = {name: TOLERANCE[dtype] for name in found if name[0] != "d"}
        bad = [n for n, x in found.items() if not x < bounds.get(n, GRADIENT[dtype])]
        case = f"{name} {str(dtype)[6:]} D{D} H{H}/{G} {k_map} T{T}"
        rows.append(dict(case=case, errors=found, passed=not bad))
        print(f"{'ok ' if not bad else 'BAD'} {case}: {max(found.values()):.1e} {bad}", flush=True)
    return rows


def milliseconds(function, device):
    """Median time of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(function, return_mode="median")
    function()
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


def softmax(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def time_prefill(layer, device):
    with torch.no_grad():
        ours = milliseconds(lambda: hybrid_chunked(layer.op, *layer.qkv, layer.start()), device)
        return ours, milliseconds(lambda: softmax(*layer.qkv, True), device)


def time_training(layer, device):
    inputs = [x.clone().requires_grad_() for x in layer.qkv]

    def run(forward):
        torch.autograd.grad(forward().sum(), inputs)

    ours = milliseconds(
        lambda: run(lambda: hybrid_chunked(layer.op, *inputs, layer.start())[0]), device
    )
    return ours, milliseconds(lambda: run(lambda: softmax(*inputs, True)), device)


def time_step(layer, device, context):
    """A step of the layer, against softmax attention over `context` cached tokens."""
    with torch.no_grad():
        state = State(*(x.clone() for x in hybrid_chunked(layer.op, *layer.qkv, layer.start())[1]))
        q, k, v = (x[:, :, :1].contiguous() for x in layer.qkv)
        cache = [
            torch.randn(k.shape[0], k.shape[1], context, k.shape[3], device=device, dtype=k.dtype)
            for _ in range(2)
        ]

        def ours():
            if step_in_place(layer.op, q, k, v, state) is None:
                hybrid_step(layer.op, q, k, v, state)

        return milliseconds(ours, device), milliseconds(lambda: softmax(q, *cache, False), device)


def bound(shape, device, step):
    """Milliseconds of the roofline, or None for a device without a data sheet here."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((key for key in DEVICES if key in name), None)
    if known is None:
        return None
    work = {"step": (step_bytes(shape), 0)} if step else prefill(shape)
    return seconds(work, known) * 1e3


def measure(device, tiny, late):
    """Rows of timings of an 8B model's layer (32/8 heads of size 128) in bf16."""
    heads = dict(H=2, G=1, D=16) if tiny else dict(H=32, G=8, D=128)
    dtype = torch.float32 if tiny else torch.bfloat16
    lengths = (128,) if tiny else (1024, 4096, 16384, 65536)
    plan = [("prefill", B, T) for B in ((1,) if tiny else (1, 8)) for T in lengths]
    plan += [("step", B, T) for B in ((1,) if tiny else (1, 8, 32, 128)) for T in lengths]
    plan += [("training", 1, T) for T in lengths[1:3] or lengths]
    rows = []
    for (what, B, T), name in itertools.product(plan, ("centroids", "hedgehog")):
        if late() or B * T > 2**18:
            continue
        length = 256 if what == "step" else T
        layer = Layer(device, B=B, T=length, feature_map=name, dtype=dtype, **heads)
        extra = (T,) if what == "step" else ()
        times = dict(prefill=time_prefill, step=time_step, training=time_training)
        ours, theirs = times[what](layer, device, *extra)
        shape = Shape(B=B, T=T, HS=heads["G"], Dv=heads["D"], F=layer.start().z.shape[-1], **heads)
        best = None if what == "training" else bound(shape, device, what == "step")
        rows.append(dict(what=what, map=name, B=B, T=T, ms=ours, softmax_ms=theirs, bound_ms=best))
        text = "" if best is None else f"{best / ours:6.0%} of the bound"
        print(
            f"{what:9s}{name:10s} B{B:<4d}T{T:<6d}{ours:9.3f} ms  softmax {theirs:9.3f} ms"
            f"  x{theirs / ours:.2f} {text}", flush=True,
        )  # fmt: skip
    return rows


def roofline():
    """Prints the bounds of an 8B model's layer (32/8 heads of size 128, W = 64, bf16)."""
    heads = dict(H=32, G=8, D=128, Dv=128)
    print("| state | F | MB per step | softmax moves less below | bytes at 8k, 32k, 128k |")
    print("|---|---|---|---|---|")
    for (name, HS), size in itertools.product((("kv_head", 8), ("q_head", 32)), (128, 256)):
        s = Shape(B=1, T=1, HS=HS, F=size, **heads)
        ratios = [
            softmax_step_bytes(Shape(B=1, T=T, HS=HS, F=size, **heads)) / step_bytes(s)
            for T in (8192, 32768, 131072)
        ]
        ratios = ", ".join(f"{ratio:.0f}x" for ratio in ratios)
        print(
            f"| {name} | {size} | {step_bytes(s) / 1e6:.2f} | {break_even_tokens(s)} | {ratios} |"
        )
    print("\n| prefill, F = 256 | " + " | ".join(f"{d}: ours, softmax" for d in DEVICES) + " |")
    print("|---" * (1 + len(DEVICES)) + "|")
    for T in (1024, 8192, 32768, 131072):
        s = Shape(B=1, T=T, HS=8, F=256, **heads)
        cells = [
            f"{seconds(prefill(s), d) * 1e3:.3f} ms, {softmax_prefill_flops(s) / f * 1e3:.3f} ms"
            for d, (_, f) in DEVICES.items()
        ]
        print(f"| {T} | " + " | ".join(cells) + " |")
    return 0


def environment(device):
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found = dict(torch=torch.__version__, python=platform.python_version(), gpu=gpu)
    if gpu:
        import triton

        found |= dict(triton=triton.__version__, architecture=architecture(device))
    return found | dict(commit=commit, path=os.environ["LINEARIZE_KERNELS"])


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("bench_gpu.json"))
    parser.add_argument("--minutes", type=float, default=8, help="no measurement starts later")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, torch path, tiny shapes")
    parser.add_argument("--roofline", action="store_true", help="print bounds on paper, and stop")
    options = parser.parse_args(arguments)
    if options.roofline:
        return roofline()
    if not (options.dry_run or torch.cuda.is_available()):
        parser.error("no GPU here; --dry-run takes the same steps on a CPU")
    end = time.monotonic() + 60 * options.minutes
    device = torch.device("cpu" if options.dry_run else "cuda")
    before = os.environ.get("LINEARIZE_KERNELS")
    os.environ["LINEARIZE_KERNELS"] = "torch" if options.dry_run else "triton"
    try:
        result = dict(environment=environment(device))
        print(result["environment"])
        result["checks"] = check(device, options.dry_run)
        options.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
        if not all(row["passed"] for row in result["checks"]):
            print("wrong results: no timings")
            return 1
        result["timings"] = measure(device, options.dry_run, lambda: time.monotonic() > end)
        options.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    finally:
        if before is None:
            del os.environ["LINEARIZE_KERNELS"]
        else:
            os.environ["LINEARIZE_KERNELS"] = before
    return 0


if __name__ == "__main__":
    sys.exit(main())
