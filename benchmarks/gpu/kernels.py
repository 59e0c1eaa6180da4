"""The stages `kernels` and `sanitizer`: the tests of the Triton kernels, compiled for the GPU that is there."""

import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.plan import StagePlan, run_logged
from benchmarks.gpu.stages import Figures, Part, PartFailed

TESTS = "tests/engine/test_triton.py"
CHECKED = "parts_of_heads or stored_apart or last_owner or depend_on_no_other"
"""A few short tests, which touch every kernel of a layer: under the sanitizer they take a hundred times as long."""
CUDA_TOOLS = "/usr/local/cuda/bin"


def kernel_parts(plan: StagePlan) -> list[Part]:
    if plan.small:
        return [Part("two tests", partial(kernel_tests, plan, "two-tests", "-k", "stored_apart or last_owner"))]
    whole = [
        Part(f"every head, {dtype}", partial(kernel_tests, plan, dtype, "-m", "long", "-k", f"every_size and {dtype}"))
        for dtype in ("torch.float32", "torch.bfloat16", "torch.float16")
    ]
    return [Part("sample", partial(kernel_tests, plan, "sample", "-m", "not slow")), *whole]


def kernel_tests(plan: StagePlan, name: str, *choice: str, before: Sequence[str] = ()) -> list[Figures]:
    """Run tests on the device, perhaps under another command. Raise PartFailed for one that fails or is skipped."""
    report = plan.folder / "logs" / f"kernels-{name}.xml"
    words = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, *choice]
    run_logged(plan.folder / "logs" / f"kernels-{name}.log", [*words, f"--junitxml={report}"], environment(plan))
    return [counted(report)]


def environment(plan: StagePlan) -> dict[str, str]:
    """Return the variables with which kernels are compiled, or interpreted on a CPU.

    torch gives each tensor memory of its own, so that what reads beyond one is seen.
    """
    others = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    where = {"TRITON_INTERPRET": "1"} if plan.device == "cpu" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return others | where


def counted(report: Path) -> Figures:
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    if skipped or not tests:
        raise PartFailed(f"{skipped} of {tests} tests were skipped; is Triton installed, and is there a GPU?")
    return {"tests": tests, "passed": tests, "seconds": float(suite.attrib["time"])}


def sanitizer_parts(plan: StagePlan) -> list[Part]:
    return [Part(tool, partial(sanitized, plan, tool)) for tool in ("memcheck", "racecheck")]


def sanitized(plan: StagePlan, tool: str) -> list[Figures]:
    """Run a few tests under NVIDIA's checker of memory accesses. Raise PartFailed when it finds anything."""
    checker = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=CUDA_TOOLS)
    if checker is None:
        raise PartFailed(
            f"compute-sanitizer is neither on the path nor in {CUDA_TOOLS}; it comes with the CUDA toolkit"
        )
    before = (checker, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all")
    return kernel_tests(plan, tool, "-k", CHECKED, before=before)
