"""Freed memory: a service with a budget keeps none of its large blocks."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import ctypes, psutil
from paceline.engine.memory import LARGE_BLOCK_BYTES, give_back_at_once

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def block(size):
    place = library.malloc(size)
    ctypes.memset(place, 1, size)
    return place

def resident():
    return psutil.Process().memory_info().rss

give_back_at_once()
library.free(block(24 * LARGE_BLOCK_BYTES))  # from then on the library would keep blocks up to this size
large, above = block(16 * LARGE_BLOCK_BYTES), block(LARGE_BLOCK_BYTES // 8)
before = resident()
library.free(large)
print((before - resident()) / LARGE_BLOCK_BYTES)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library has no such setting")
def test_a_large_block_below_a_small_one_is_given_back() -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert float(ended.stdout) > 15
