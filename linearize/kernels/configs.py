"""The static table of tile sizes, warps and stages, per architecture: no autotuning, so a call
never compiles more than it runs, and numerics do not depend on timing.

Legend: D head size, Dv value size, F features, C chunk, N sinks; ..P padded, B.. tile sizes.
"""

import os
from typing import NamedTuple

import torch

# Rows by operation and padded head size, for 16-bit inputs; fp32 tiles are at most 32 wide.
_SM_90 = {
    ("state", 64): dict(BF=64, BV=64, num_warps=4, num_stages=3),
    ("state", 128): dict(BF=64, BV=64, num_warps=4, num_stages=3),
    ("out", 64): dict(BF=64, num_warps=8, num_stages=2),
    ("out", 128): dict(BF=64, num_warps=8, num_stages=2),
    ("queries", 64): dict(BF=64, num_warps=8, num_stages=2),
    ("queries", 128): dict(BF=64, num_warps=8, num_stages=2),
    ("rows", 64): dict(num_warps=8, num_stages=2),
    ("rows", 128): dict(num_warps=8, num_stages=2),
    ("keys", 64): dict(BQ=64, num_warps=8, num_stages=2),
    ("keys", 128): dict(BQ=32, num_warps=8, num_stages=2),
    ("sinks", 64): dict(num_warps=4, num_stages=2),
    ("sinks", 128): dict(num_warps=4, num_stages=2),
    ("features", 64): dict(BF=64, num_warps=8, num_stages=2),
    ("features", 128): dict(BF=64, num_warps=8, num_stages=2),
    ("step", 64): dict(BF=32, BW=64, num_warps=4, num_stages=2),
    ("step", 128): dict(BF=32, BW=64, num_warps=8, num_stages=2),
}
_SM_80 = _SM_90 | {
    ("state", 64): dict(BF=64, BV=64, num_warps=8, num_stages=3),
    ("state", 128): dict(BF=64, BV=64, num_warps=8, num_stages=3),
    ("features", 64): dict(BF=32, num_warps=8, num_stages=1),
    ("features", 128): dict(BF=32, num_warps=8, num_stages=1),
}
_GFX942 = {key: row | dict(num_warps=4) for key, row in _SM_90.items()} | {
    ("keys", 64): dict(BQ=32, num_warps=4, num_stages=2),
    ("rows", 128): dict(num_warps=4, num_stages=1),  # two stages exceed 64 KB
}
TABLE = {"sm_90": _SM_90, "sm_80": _SM_80, "gfx942": _GFX942, "interpreter": _SM_90}
CHUNK = 64
CHUNK_FP32 = 32  # tiles of fp32 are twice as large
SMALLEST = 16  # the least rows or columns of tl.dot


class Config(NamedTuple):
    """What a launch needs beside shapes: meta are the kernel's tile arguments and options."""

    meta: dict
    FP: int
    VP: int
    BF: int
    BV: int


def interpreted():
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def architecture(device):
    """The table's name for a device, or None if it has no row."""
    if interpreted():
        return "interpreter"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return name if name in TABLE else None
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major)


def chunk_of(x):
    return CHUNK_FP32 if x.dtype == torch.float32 else CHUNK


def precision_of(x):
    """How fp32 operands are multiplied: as torch's own setting says; AMD has fp32 only."""
    exact = torch.get_float32_matmul_precision() == "highest" or torch.version.hip
    return "ieee" if exact or x.dtype != torch.float32 else "tf32"


def precision_of_state(device):
    """How the fp32 state is multiplied in a step: three products of tf32 make an fp32 one."""
    return "ieee" if torch.version.hip or interpreted() else "tf32x3"


def padded(size):
    """The next power of two that tl.dot takes."""
    return max(SMALLEST, 1 << (size - 1).bit_length())


def choose(operation, like, *, F=1, DV=1, D=1, N=0, arch=None):
    """The Config of one operation on tensors like `like`."""
    arch = architecture(like.device) if arch is None else arch
    row = dict(TABLE[arch][operation, 64 if max(D, DV) <= 64 else 128])
    if like.dtype == torch.float32:
        row |= {key: 32 for key in ("BF", "BQ", "BV") if key in row}
    sizes = {}
    BF = BV = FP = 0
    if "BF" in row:
        BF = row["BF"] = min(row["BF"], padded(F))
        FP = sizes["FP"] = -(-F // BF) * BF
    VP = padded(DV)
    if "BV" in row:
        BV = row["BV"] = min(row["BV"], VP)
        VP = -(-DV // BV) * BV
    sizes["VP"] = VP
    if operation in ("out", "rows", "keys", "sinks", "step"):
        sizes["DP"] = padded(D)
    if operation in ("out", "rows", "sinks", "step"):
        sizes["BN"] = padded(max(N, 1))
    return Config(row | sizes, FP, VP, BF, BV)
