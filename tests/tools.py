"""Tools that not every machine has."""

import os
from typing import NoReturn

import pytest

from paceline.engine.native import Kernels, find_kernels


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
