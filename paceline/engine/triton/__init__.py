"""Kernels of a decoder in Triton, for CUDA. `TRITON_INTERPRET=1` runs them on a CPU, slowly, for tests."""

from paceline.engine.triton.choices import TritonChoices
from paceline.engine.triton.kernels import TritonKernels
from paceline.engine.triton.products import TiledWeight

__all__ = ["TiledWeight", "TritonChoices", "TritonKernels"]
