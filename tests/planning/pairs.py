"""Pairs that plans are tested with: the built-in one, and one of usual sizes."""

from dataclasses import replace

from paceline.planning.dimensions import ModelDimensions, read_dimensions
from paceline.planning.search import Pair

BUILTIN = Pair(read_dimensions("builtin:target"), read_dimensions("builtin:draft"))
QWEN3_8B = ModelDimensions(36, 4096, 12_288, 32, 8, 128, 151_936, 40_960, "bfloat16", is_tied=False)
QWEN3_600M = ModelDimensions(28, 1024, 3072, 16, 8, 128, 151_936, 40_960, "bfloat16", is_tied=True)
LARGE = Pair(QWEN3_8B, QWEN3_600M)
LARGE_ON_CUDA = replace(LARGE, device="cuda")
