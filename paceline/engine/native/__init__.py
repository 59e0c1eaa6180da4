"""Compiled operations of a decoder on a CPU, in float32 or bfloat16.

`hatch_build.py` builds `kernels.cpp` when the package is installed, if there is a compiler; `kernels.py` calls it, and
`products.py` multiplies with it. Without it torch does the same, slower.
"""

from paceline.engine.native.choices import NativeChooser, RankedPlaces, RowInputs, row_places
from paceline.engine.native.kernels import HEAD_SIZES, Kernels, PassRows, check_positions, find_kernels
from paceline.engine.native.products import PackedWeight, packed
from paceline.engine.native.recording import Program

__all__ = [
    "HEAD_SIZES",
    "Kernels",
    "NativeChooser",
    "PackedWeight",
    "PassRows",
    "Program",
    "RankedPlaces",
    "RowInputs",
    "check_positions",
    "find_kernels",
    "packed",
    "row_places",
]
