"""Compiled operations of a float32 decoder on one thread of a CPU.

`hatch_build.py` builds `kernels.cpp` when the package is installed, if there is a compiler, and `kernels.py` calls it.
Without it torch does the same, slower.
"""

from paceline.engine.native.kernels import HEAD_SIZES, Kernels, PassRows, find_kernels

__all__ = ["HEAD_SIZES", "Kernels", "PassRows", "find_kernels"]
