"""Triton's interpreter, repaired: import it before any kernel, in a process of its own.

Up to Triton 3.9.0 the interpreter multiplies the raw 16-bit patterns of bf16 operands in tl.dot
(triton-lang/triton issue 11584). The operands are widened here; `test_interpreter.py` measures one
product, so that a release that repairs it, or moves the hook, is noticed.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_create_dot = interpreter.InterpreterBuilder.create_dot


def _widen(operand):
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _dot(self, a, b, *rest):
    return _create_dot(self, _widen(a), _widen(b), *rest)


def repair():
    interpreter.InterpreterBuilder.create_dot = _dot


def undo():
    interpreter.InterpreterBuilder.create_dot = _create_dot
