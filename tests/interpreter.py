"""Triton's interpreter, mended where it does not multiply as a GPU does. It runs the kernels of a GPU on a CPU."""

from typing import Any

import numpy as np
import numpy.typing as npt


def mend() -> None:
    """Replace the interpreter's product of tiles.

    Its own multiplies the bits of bfloat16 numbers as integers (seen in 3.6 to 3.9), and leaves others to BLAS, whose
    rounding of a row depends on the row's place in the tile. A sum in float64 does not, as far as float32 can show.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(builder: Any, rows: Any, columns: Any, total: Any, *precision: Any) -> Any:
        product = np.matmul(_exact(rows), _exact(columns)).astype(total.data.dtype)
        return TensorHandle(product + total.data, total.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _exact(tile: Any) -> npt.NDArray[np.float64]:
    if tile.dtype.scalar.is_bf16():
        return (tile.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.asarray(tile.data, np.float64)
