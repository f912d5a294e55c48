"""GPU kernels of the hybrid operator, and `find`, which says whether one can do a given call.

A leaf: functions on tensors that import nothing of ours, and Triton only when a kernel runs. The
function, its symbols and its state are those of `modeling/ops.py`, which is what runs where no
kernel can.
"""

from .choice import find, find_step

__all__ = ["find", "find_step"]
