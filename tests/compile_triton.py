"""Compiles the engine's Triton kernels for GPUs that need not be here: `python -m tests.compile_triton`.

Kernels are launched by the engine's own code, on tensors without memory, so they are specialised as at a real launch.
Triton gets a driver that assembles them, reads what they take, and runs nothing. It fails on shared memory that the
GPU lacks, on registers that spill, and on a kernel that would be compiled anew for other rows.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from paceline.engine.attention.tables import planned_rows
from paceline.engine.interfaces import Span
from paceline.engine.plan import BatchPlan
from paceline.engine.row_choice import RowRules
from paceline.engine.triton import (
    TiledWeight,
    TritonChoices,
    TritonKernels,
    attention_kernels,
    choice_kernels,
    layer_kernels,
    product_kernels,
)
from paceline.engine.triton.order import LEAST_CAPABILITY
from paceline.measure.tables import markdown_table

NOWHERE = torch.device("meta")
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that one program may have, by the GPU's compute capability."""
SPILL_BYTES = 32
"""Bytes a thread that may spill: the assembler lets a few addresses go, so that more programs fit beside each other."""
HEAD_SIZES, GROUP_SIZES = (48, 64, 80, 96, 128, 256), (1, 4, 8, 16)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODULES: tuple[ModuleType, ...] = (attention_kernels, choice_kernels, layer_kernels, product_kernels)
PAGE_TOKENS = 16
KV_HEADS = 2


@dataclass(frozen=True)
class Case:
    """The sizes of a model, as far as they matter to kernels."""

    head_size: int
    group_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.head_size} x {self.group_size}, {str(self.dtype).removeprefix('torch.')}"


SAMPLE = (
    Case(128, 4, torch.bfloat16),
    Case(256, 16, torch.bfloat16),
    Case(80, 16, torch.float16),
    Case(64, 1, torch.float16),
    Case(48, 8, torch.float32),
    Case(256, 4, torch.float32),
)


@dataclass(frozen=True)
class Assembled:
    """What one program of a kernel takes of a GPU."""

    kernel: str
    registers: int
    """A thread."""
    spilled_bytes: int
    """A thread."""
    shared_bytes: int


@dataclass
class AssemblingDriver:
    """Stands in for Triton's driver of a device. Compiled kernels are noted, and launches do nothing."""

    capability: int
    assembled: list[Assembled] = field(default_factory=list)

    @property
    def utils(self) -> "AssemblingDriver":
        return self

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        # What does not fit is found by `faults`, and the other kernels are compiled nevertheless.
        return {"max_shared_mem": 1 << 30}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None

    def load_binary(
        self, kernel: str, binary: bytes, shared_bytes: int, device: int
    ) -> tuple[object, int, int, int, int]:
        """Return a module, a function, registers, spills and the most threads, as Triton's own driver does."""
        registers, spilled_bytes = resources(binary)
        self.assembled.append(Assembled(kernel, registers, spilled_bytes, shared_bytes))
        return object(), 0, registers, spilled_bytes, 1024


def resources(binary: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of each thread of an assembled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def launch(case: Case, spans: list[Span], overlaps: bool) -> None:
    """Launch every kernel as a pass over the spans would."""
    kernels = TritonKernels(overlaps)
    counts = [-(-span.length // PAGE_TOKENS) for span in spans]
    pages = [list(range(sum(counts[:index]), sum(counts[: index + 1]))) for index in range(len(spans))]
    rows = planned_rows(BatchPlan(spans, pages, PAGE_TOKENS), case.group_size, NOWHERE)
    token_count, size = spans[-1].stop, case.head_size
    keys, values = empty(2, KV_HEADS, 16_384, size, dtype=case.dtype)
    heads = KV_HEADS * (case.group_size + 2)
    rotation = norms = empty(1024, size), empty(1024, size)
    for has_norms in (False, True):
        projected = empty(token_count, heads * size)
        kernels.attend(rows, projected, keys, values, rotation, norms if has_norms else None, 1e-6, 0.1)
    key, value = (empty(KV_HEADS, token_count, size, dtype=case.dtype) for _ in range(2))
    kernels.store(rows, key, value, keys, values)
    launch_between(kernels, case.dtype, token_count)


def launch_between(kernels: TritonKernels, dtype: torch.dtype, token_count: int) -> None:
    """Launch what does not depend on heads."""
    width = 4096
    for columns, has_bias in ((1024, True), (4096, False), (12_288, False)):
        weight, bias = empty(columns, width, dtype=dtype), empty(columns) if has_bias else None
        TiledWeight(kernels, weight, bias)(empty(token_count, width))
    for added in (None, empty(token_count, width)):
        kernels.add_and_norm(empty(token_count, width), added, empty(width), 1e-6, dtype)
    kernels.gate(empty(token_count, 2 * 12_288), dtype)
    positions = empty(token_count, dtype=torch.int64)
    TritonChoices().choose_rows(empty(token_count, 151_936), RowRules.empty(token_count, NOWHERE), positions)


def empty(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=NOWHERE)


FEW_ROWS = [Span("a", 0, 1, 5)]
MANY_ROWS = [Span("a", 0, 6, 700), Span("b", 6, 64, 340)]
"""Rows that differ from the few in all that differs between passes, such as being 1 or a multiple of 16."""


def faults(case: Case, capability: int) -> Iterator[str]:
    """Compile a case for a GPU, print what its kernels take, and yield what is wrong."""
    gpu = AssemblingDriver(capability)
    driver.set_active(gpu)
    overlaps = capability >= 10 * LEAST_CAPABILITY
    launch(case, MANY_ROWS, overlaps)
    print(f"sm_{capability}, heads {case}\n{table(gpu.assembled)}")
    for one in gpu.assembled:
        if one.spilled_bytes > SPILL_BYTES:
            yield f"{one.kernel} of heads {case} spills {one.spilled_bytes} bytes a thread on sm_{capability}"
        if one.shared_bytes > SHARED_BYTES[capability]:
            yield (
                f"{one.kernel} of heads {case} takes {one.shared_bytes} bytes of shared memory, and "
                f"sm_{capability} has {SHARED_BYTES[capability]}"
            )
    known = len(gpu.assembled)
    launch(case, FEW_ROWS, overlaps)
    for one in gpu.assembled[known:]:
        yield f"{one.kernel} of heads {case} is compiled anew for other rows; see `do_not_specialize`"


def table(assembled: list[Assembled]) -> str:
    rows = [(one.kernel, *map(str, (one.registers, one.spilled_bytes, one.shared_bytes))) for one in assembled]
    return markdown_table(("kernel", "registers", "spilled bytes", "shared bytes"), rows)


def unlaunched() -> list[str]:
    """Return the kernels that no case compiled. What other kernels call is named without `_kernel`."""
    every = {name: one for module in MODULES for name, one in vars(module).items() if isinstance(one, JITFunction)}
    return [name for name, one in every.items() if name.endswith("_kernel") and not one.device_caches]


def main(
    whole: Annotated[bool, typer.Option("--whole", help="Every head size, group and dtype, not a sample.")] = False,
) -> None:
    """Compile the kernels, and fail with a list of what is wrong."""
    cases = [Case(*one) for one in product(HEAD_SIZES, GROUP_SIZES, DTYPES)] if whole else SAMPLE
    wrong = [fault for case in cases for capability in SHARED_BYTES for fault in faults(case, capability)]
    wrong += [f"{name} was launched by no case; add it to `launch`" for name in unlaunched()]
    print(*wrong, sep="\n")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
