"""Tools that not every machine has."""

import os
from typing import NoReturn

import pytest


def missing(message: str) -> NoReturn:
    """Skip the test, or fail it where `REQUIRE_TOOLS` is set."""
    if os.environ.get("REQUIRE_TOOLS"):
        pytest.fail(message)
    pytest.skip(message)
