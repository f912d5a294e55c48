"""Bytes on paper against the tensors that the kernels are handed."""

import pytest
import torch

pytest.importorskip("triton", reason='needs pip install -e ".[dev]"')

from linearize.kernels import configs, decode, out, state
from linearize.kernels.roofline import (
    Shape,
    break_even_tokens,
    prefill,
    seconds,
    softmax_step_bytes,
    step_bytes,
)

SHAPES = {
    "HS=G": Shape(B=2, H=4, G=2, HS=2, T=100, D=64, Dv=32, F=48, W=33, N=3),
    "HS=H": Shape(B=1, H=4, G=2, HS=4, T=64, D=16, Dv=16, F=16, W=1, N=0),
}


class Launch:
    """Stands for a kernel, and adds up the bytes of its tensors."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **_):
        # each tensor once, without those of a few numbers per head or row
        tensors = {x.data_ptr(): x for x in arguments if isinstance(x, torch.Tensor) and x.ndim > 1}
        self.bytes = sum(x.nbytes for x in tensors.values())


@pytest.fixture
def launches(monkeypatch):
    kernels = {name: Launch() for name in ("state", "out", "step")}
    monkeypatch.setattr(state, "state_forward", kernels["state"])
    monkeypatch.setattr(out, "output_forward", kernels["out"])
    monkeypatch.setattr(decode, "step_forward", kernels["step"])
    monkeypatch.setattr(decode, "shift_windows", Launch())
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    return kernels


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("s", SHAPES.values(), ids=SHAPES)
def test_prefill_bytes(s, launches):
    k, v = (empty(s.B, s.G, s.keys, size) for size in (s.D, s.Dv))
    sinks = [empty(s.B, s.G, s.N, size) for size in (s.D, s.Dv)]
    fq, fk = empty(s.B, s.H, s.T, s.F), empty(s.B, s.HS, s.T, s.F)
    S, z = (empty(s.B, s.HS, s.F, *rest, dtype=torch.float32) for rest in ((s.Dv,), ()))
    seen, head = torch.zeros(s.B, dtype=torch.int64), torch.zeros(s.H)
    grid = dict(window=s.W, chunk=s.C, precision="ieee")
    h, hz, _, _ = state.prefixes(fk, v, S, z, seen, sinks=s.N, **grid)
    out.outputs(
        empty(s.B, s.H, s.T, s.D), k, v, *sinks, fq, fk, None, head, head, seen, h, hz,
        scaling=1.0, save=False, **grid,
    )  # fmt: skip
    for name, (count, _) in prefill(s).items():
        assert launches[name].bytes == count, name


@pytest.mark.parametrize("s", SHAPES.values(), ids=SHAPES)
def test_step_bytes(s, launches):
    S, z = (empty(s.B, s.HS, s.F, *rest, dtype=torch.float32) for rest in ((s.Dv,), ()))
    q, k, v = (empty(s.B, n, 1, d) for n, d in ((s.H, s.D), (s.G, s.D), (s.G, s.Dv)))
    sinks = [empty(s.B, s.G, s.N, size) for size in (s.D, s.Dv)]
    window = [empty(s.B, s.G, s.W - 1, size) for size in (s.D, s.Dv)]
    maps = [empty(heads, s.D, s.F, dtype=torch.float32) for heads in (s.H, s.HS)]
    bias, head = torch.zeros(1), torch.zeros(s.H)
    decode.step(
        q, k, v, maps[0], bias, maps[1], bias, head, head, S, z, *sinks, *window,
        torch.zeros(s.B, dtype=torch.int64), scaling=1.0, precision="ieee", precision_state="ieee",
    )  # fmt: skip
    once = launches["step"].bytes
    twice = sum(x.nbytes for x in (S, z, *window))
    assert once + twice == step_bytes(s, map_bytes=sum(x.nbytes for x in maps))


def test_the_break_even_is_where_the_bytes_cross():
    s = Shape(B=1, H=32, G=8, HS=8, T=1, D=128, Dv=128, F=128)
    tokens = break_even_tokens(s)
    at, before = (softmax_step_bytes(Shape(**{**s.__dict__, "T": t})) for t in (tokens, tokens - 1))
    assert before < step_bytes(s) <= at


def test_the_slower_of_memory_and_arithmetic_counts():
    work = {"memory": (3.35e12, 0), "arithmetic": (0, 2 * 989e12)}
    assert seconds(work, "H100") == pytest.approx(3.0)
