"""The real Prometheus and its promtool, as Debian packages them."""

import os
import shutil

import pytest


def prometheus_tool(name: str) -> str:
    """Path of `prometheus` or `promtool`. Without it the test is skipped, but in CI, where it must be there."""
    found = shutil.which(name)
    if found is None:
        message = f"{name} is not installed; scripts/prometheus installs the Debian package"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found
