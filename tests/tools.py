"""Tools that not every machine has."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch

from coordinator.drafting.native import Library, find_library
from paceline.engine.native import Kernels, find_kernels
from paceline.engine.native.products import can_pack
from paceline.engine.quantization import QuantizedWeight
from tests.interpreter import mend


def missing(message: str) -> NoReturn:
    """Skip the test, or fail it where `REQUIRE_TOOLS` is set."""
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(message)
    pytest.skip(message)


def built_kernels() -> Kernels:
    """Return the compiled operations; without them skip the test, or fail it where `REQUIRE_TOOLS` is set."""
    kernels = find_kernels()
    if kernels is None:
        missing("the kernels were not built; scripts/compiler installs a compiler, then remove .venv")
    return kernels


def rounds_rows_here() -> bool:
    """Return whether products here take rows that are rounded to int8 (`w8a8`)."""
    return can_pack(QuantizedWeight.of(torch.ones(16, 16), rounds_rows=True))


NEEDS_ROUNDED_ROWS = pytest.mark.skipif(not rounds_rows_here(), reason="needs AVX2 and the kernels")


def built_suffixes() -> Library:
    """Return the compiled index of suffixes; without it skip the test, or fail it where `REQUIRE_TOOLS` is set."""
    library = find_library()
    if library is None:
        missing("the index of suffixes was not built; scripts/compiler installs a compiler, then remove .venv")
    return library


def triton_device() -> torch.device:
    """Return where Triton's kernels run: on a GPU, or with `TRITON_INTERPRET=1` on the CPU, see tests/conftest.py."""
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")


def triton_runs() -> None:
    """Let Triton's kernels run. Without Triton skip the test, or fail it where `REQUIRE_TOOLS` is set."""
    if importlib.util.find_spec("triton") is None:
        missing("Triton is not installed; it comes with the development packages on Linux")
    if triton_device().type == "cpu":
        mend()


@contextmanager
def kernels_of_a_gpu(*, checked: bool = False) -> Iterator[None]:
    """Give models that are loaded inside the backend of a GPU; where there is none, its kernels are interpreted.

    Unless `checked`, loading compares no passes with the model's own: interpreted, that takes longer than most tests.
    """
    triton_runs()
    from paceline.engine.backend import triton_backend

    with ExitStack() as patches:
        patches.enter_context(patch("paceline.engine.model.loader.find_backend", lambda device: triton_backend()))
        if not checked:
            patches.enter_context(patch("paceline.engine.loading.check_model"))
        yield
