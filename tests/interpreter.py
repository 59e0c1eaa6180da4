"""Triton's interpreter, mended where it does not compute as a GPU does. It runs the kernels of a GPU on a CPU."""

import inspect
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt


def mend() -> None:
    """Replace the interpreter's product of tiles, its rounding to bfloat16, and its search of what to replace itself.

    Its product multiplies the bits of bfloat16 numbers as integers (seen in 3.6 to 3.9). It leaves others to BLAS,
    whose rounding of a row depends on the row's place in the tile; a sum in float64 does not, as far as float32 can
    show. To bfloat16 it cuts numbers off, where a GPU rounds them to the nearest. For every launch it looks through all
    of Triton's language, which takes a third of the time of small launches.
    """
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, rows: Any, columns: Any, total: Any, *precision: Any) -> Any:
        product = np.matmul(_exact(rows), _exact(columns)).astype(total.data.dtype)
        return TensorHandle(product + total.data, total.dtype.scalar)

    cast = InterpreterBuilder.cast_impl

    def rounding_cast(builder: Any, number: Any, to: Any) -> Any:
        if to.scalar.is_bf16() and number.dtype.scalar.is_fp32():
            return TensorHandle(_rounded(number.data), to.scalar)
        return cast(builder, number, to)

    @cache
    def builtins_of(part: ModuleType | type) -> list[str]:
        return [name for name, member in inspect.getmembers(part) if interpreter.tl.core.is_builtin(member)]

    def patch_builtin(part: ModuleType | type, builder: Any, scope: Any) -> None:
        for name in builtins_of(part):
            member = getattr(part, name)
            if interpreter.tl.core.is_builtin(member):
                interpreter._patch_attr(part, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    InterpreterBuilder.create_dot = create_dot
    if cast.__name__ != rounding_cast.__name__:
        InterpreterBuilder.cast_impl = rounding_cast


def _exact(tile: Any) -> npt.NDArray[np.float64]:
    if tile.dtype.scalar.is_bf16():
        words: npt.NDArray[np.uint32] = tile.data.astype(np.uint32) << 16
        return words.view(np.float32).astype(np.float64)
    return np.asarray(tile.data, dtype=np.float64)


def _rounded(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of bfloat16, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    kept = np.where(np.isnan(numbers), bits | np.uint32(0x400000), rounded)
    return (kept >> np.uint32(16)).astype(np.uint16)
