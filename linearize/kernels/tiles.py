"""What the kernels share: loads of tiles whose rows end somewhere and whose width may be padded.

All arithmetic happens in fp32: every loaded tile is either an operand of `tl.dot` in its own dtype,
or cast first.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-80.0)  # log of the smallest and largest weight that the exact part can have
HIGHEST = tl.constexpr(60.0)  # beside linear weights of order 1; beyond, one part is negligible


@triton.jit
def load_rows(X, rows, cols, there, WIDTH: tl.constexpr, PADDED: tl.constexpr, stride):
    """X[rows, cols] as [rows, cols], zero where a row is not there or a column is padding."""
    pointers = X + rows[:, None] * stride + cols[None, :]
    if PADDED == WIDTH:
        return tl.load(pointers, mask=there[:, None], other=0.0)
    return tl.load(pointers, mask=there[:, None] & (cols < WIDTH)[None, :], other=0.0)


@triton.jit
def load_columns(X, rows, cols, there, WIDTH: tl.constexpr, PADDED: tl.constexpr, stride):
    """X[rows, cols] as [cols, rows]: a transpose by addressing."""
    pointers = X + rows[None, :] * stride + cols[:, None]
    if PADDED == WIDTH:
        return tl.load(pointers, mask=there[None, :], other=0.0)
    return tl.load(pointers, mask=there[None, :] & (cols < WIDTH)[:, None], other=0.0)


@triton.jit
def store_rows(X, tile, rows, cols, there, WIDTH: tl.constexpr, PADDED: tl.constexpr, stride):
    """Writes [rows, cols] to X[rows, cols], in X's dtype."""
    mask = there[:, None]
    if PADDED != WIDTH:
        mask = mask & (cols < WIDTH)[None, :]
    tl.store(X + rows[:, None] * stride + cols[None, :], tile.to(X.dtype.element_ty), mask=mask)
