"""Triton's interpreter, where it does not compute what a GPU does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from glmspec.plugins.rounding import values_of


def compute_as_gpus_do() -> None:
    """Patch the interpreter of this process."""
    _compare()
    _multiply()


def _compare() -> None:
    """Of a number and a NaN a GPU's max and min give the number; the interpreter gives the NaN."""
    from triton.runtime.interpreter import InterpreterBuilder

    _replace(
        InterpreterBuilder,
        create_maxnumf=lambda self, x, y: self.binary_op(x, y, np.fmax),
        create_minnumf=lambda self, x, y: self.binary_op(x, y, np.fmin),
    )


def _multiply() -> None:
    """The interpreter has no product of scaled operands, takes bfloat16's bits for numbers in other products, and
    float8's when it widens those to bfloat16."""
    from triton.language import bfloat16, float8e4nv, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def values(handle: Any) -> Any:
        if handle.dtype != bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain_dot(self, values(a), values(b), *others)

    def cast(self: Any, x: Any, to: Any) -> Any:
        if x.dtype.scalar != float8e4nv or to.scalar != bfloat16:
            return plain_cast(self, x, to)
        wide = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.float8_e4m3fn).float().numpy()
        return TensorHandle((wide.view(np.uint32) >> 16).astype(np.uint16), bfloat16)  # exact

    def scaled(handle: Any, scale: Any) -> np.ndarray:
        """float32 [rows, K], of e2m1 codes two a byte."""
        return values_of(torch.from_numpy(handle), torch.from_numpy(scale).view(torch.float8_e4m3fn)).numpy()

    def dot_scaled(self: Any, a, a_scale, a_format, b, b_scale, b_format, fast, a_packed, b_packed, sums) -> Any:
        a_MK, b_NK = scaled(a.data, a_scale.data), scaled(b.data.T.copy(), b_scale.data)
        return TensorHandle(a_MK @ b_NK.T + sums.data, sums.dtype.scalar)

    _replace(InterpreterBuilder, create_dot=dot, create_dot_scaled=dot_scaled, cast_impl=cast)


def _replace(builder: type, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        setattr(builder, name, method)
