"""Compiled operations of a float32 decoder on one thread of a CPU.

`kernels.cpp` is built where the package is installed (`hatch_build.py`), if there is a compiler; `kernels.py` calls it.
Without it torch does the same, slower.
"""

from paceline.engine.native.kernels import HEAD_SIZES, Kernels, PassRows, find_kernels

__all__ = ["HEAD_SIZES", "Kernels", "PassRows", "find_kernels"]
