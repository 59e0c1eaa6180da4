"""A backend is how a device does what a model's passes consist of. It is chosen by the device when a model is loaded.

torch alone can do everything; a backend has what is faster, and whose results depend on no other row of a pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog
import torch

from paceline.engine.attention.paged import AttentionMaker, PagedAttention
from paceline.engine.attention.tables import TableAttention, TableKernels, planned_rows
from paceline.engine.interfaces import Attention
from paceline.engine.native import NativeChooser, find_kernels, packed
from paceline.engine.plan import BatchPlan
from paceline.engine.quantization import QuantizedWeight
from paceline.engine.row_choice import ChoiceKernels, Chooser, DeviceChooser, Ranker
from paceline.engine.scratch import Memory, new_memory

log = structlog.get_logger()


class Product(Protocol):
    """A weight [N, K] and a bias [N] or none."""

    @property
    def way(self) -> str:
        """Name how it is computed."""
        ...

    def __call__(self, values: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Turn [M, K] of any dtype into [M, N] of float32. A row's result depends on no other row.

        On a CPU, `memory` is where the result may lie.
        """
        ...


class LayerKernels(Protocol):
    """The operations of a layer between its products. Numbers are float32 where no dtype is named.

    On a CPU, `memory` is where a result lies.
    """

    @property
    def name(self) -> str:
        """Name what decides how they round, such as the length of vectors."""
        ...

    def fits(self, head_size: int) -> bool:
        """Return whether `attend` can do heads of this size."""
        ...

    def is_row_independent(self, layout: str) -> bool:
        """Return whether no result depends on other rows, to the last bit, with a cache of this layout."""
        ...

    def rows_of(self, attention: Attention) -> Any:
        """Return a pass's rows in the form that `attend` reads; None if it cannot read this attention's memory."""
        ...

    def add_and_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        dtype: torch.dtype = torch.float32,
        memory: Memory = new_memory,
    ) -> torch.Tensor:
        """Add `added` [T, N] to `hidden` [T, N], in place; return its root mean square norm [T, N] in `dtype`."""
        ...

    def gate(
        self, gate_and_up: torch.Tensor, dtype: torch.dtype = torch.float32, memory: Memory = new_memory
    ) -> torch.Tensor:
        """Multiply the silu of the first half of [T, 2 N] by the second: [T, N] (SwiGLU; Shazeer, arXiv 2002.05202)."""
        ...

    def take(self, values: torch.Tensor, places: torch.Tensor, memory: Memory = new_memory) -> torch.Tensor:
        """Return the rows [W, N] of `values` [T, N] at `places` [W]."""
        ...

    def copied(self, values: torch.Tensor, dtype: torch.dtype, memory: Memory = new_memory) -> torch.Tensor:
        """Return a copy of `values` [T, N] in `dtype`."""
        ...

    def attend(
        self,
        rows: Any,
        projected: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        scaling: float,
        memory: Memory = new_memory,
        *,
        is_last: bool = False,
    ) -> torch.Tensor:
        """Store the new keys and values, and let every query see its own sequence up to itself.

        `projected` holds queries, keys and values, [T, (H + 2 KV heads) * D], and may be overwritten. `keys` and
        `values` are a layer's memory, [KV heads, slots, D], whose dtype the result has. `rotation` is the cosines and
        the signed sines, [positions, D]. `norms` are the weights [D] of the query and the key norm.

        Return [T, H * D]. With `is_last`, results of tokens that are not wanted, as the rows say, may be anything.
        """
        ...


Pack = Callable[[torch.Tensor, torch.Tensor | None], Product | None]
"""Makes a product of a weight [N, K] and a bias [N] or none; returns None if the backend cannot."""
PackQuantized = Callable[[QuantizedWeight, torch.Tensor | None], Product | None]


@dataclass(frozen=True)
class Backend:
    attention: AttentionMaker = PagedAttention
    pack: Pack = lambda weight, bias: None
    pack_quantized: PackQuantized = lambda weight, bias: None
    kernels: LayerKernels | None = None
    tables: TableKernels | None = None
    """Kernels for passes that are recorded and replayed; None where that does not pay."""
    choices: ChoiceKernels | None = None
    """Kernels that choose the tokens of many rows at once; they come with `tables`."""
    chooser: Chooser | None = None
    """Makes choices faster than torch."""
    ranker: Ranker | None = None


def find_backend(device: torch.device) -> Backend:
    """Return the best backend that was built or installed for the device."""
    if device.type == "cpu":
        if kernels := find_kernels():
            choices = NativeChooser(kernels)
            return Backend(pack=packed, pack_quantized=packed, kernels=kernels, chooser=choices, ranker=choices)
        return Backend()
    try:
        check_triton()
        return triton_backend()
    except ImportError as error:
        log.warning(
            "passes are neither compiled nor recorded; install Triton, a C compiler and Python's headers, and they are "
            "faster",
            error=str(error),
        )
        return Backend()


def check_triton() -> None:
    """Have Triton build what it launches kernels with. Raise ImportError where it is not there, or cannot.

    It compiles that with the C compiler of the machine, and would do so only at the first kernel, amid a load.
    """
    from triton.runtime.driver import driver

    try:
        driver.active  # noqa: B018  (it is built when it is asked for)
    except Exception as error:  # Triton's own, and whatever compiler, linker and driver raise
        raise ImportError(f"Triton cannot launch kernels here: {error}") from error


def triton_backend() -> Backend:
    """Return the backend of Triton's kernels. Raise ImportError where there is no Triton."""
    from paceline.engine.triton import TiledWeight, TritonChoices, TritonKernels

    kernels, choices = TritonKernels(), TritonChoices()

    def attention(memory: torch.Tensor, group_size: int, plan: BatchPlan) -> TableAttention:
        return TableAttention(memory, planned_rows(plan, group_size, memory.device), kernels)

    pack, chooser = partial(TiledWeight, kernels), DeviceChooser(choices)
    return Backend(attention, pack, kernels=kernels, tables=kernels, choices=choices, chooser=chooser)
