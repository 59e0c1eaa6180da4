"""Which backend a device gets."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from paceline.engine.backend import find_backend
from tests.tools import triton_runs


@pytest.fixture
def gpu_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have Triton take this machine for one with a GPU where no C compiler is found, as in a slim image."""
    triton_runs()
    from triton.backends.nvidia.driver import CudaDriver, CudaUtils
    from triton.runtime.driver import driver

    monkeypatch.setattr(CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.delattr(CudaUtils, "instance", raising=False)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("gpu_without_a_compiler")
def test_a_gpu_for_which_triton_can_build_nothing_is_served_by_torch_and_the_log_says_what_is_missing() -> None:
    """The first kernel ended the start with Triton's own error."""
    with capture_logs() as lines:
        backend = find_backend(torch.device("cuda"))
    assert backend.kernels is None and backend.tables is None
    (line,) = lines
    assert "C compiler" in line["event"] and "Failed to find C compiler" in line["error"]
