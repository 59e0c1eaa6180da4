"""What kernels of a device do for recorded passes, by torch's operations on the CPU: fast enough for whole clusters."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F

from paceline.engine.attention.tables import TableAttention, TableRows, planned_rows
from paceline.engine.backend import Backend
from paceline.engine.noise import gumbel_at, stream_starts
from paceline.engine.plan import BatchPlan
from paceline.engine.row_choice import NO_TOKEN, DeviceChooser, RowRules
from paceline.engine.sampling import filtered
from paceline.types import SamplingParameters


class TorchTables:
    """`TableKernels`."""

    def store(
        self, rows: TableRows, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        real = rows.slots >= 0
        for memory, new in ((keys, key), (values, value)):
            memory[:, rows.slots[real]] = new[:, real]

    def read(
        self, rows: TableRows, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        attended = torch.zeros_like(query)
        for first, count, position, table in rows.tiles.tolist():
            if count:
                places = torch.arange(position + count)
                slots = rows.tables[table][places // rows.page_tokens] * rows.page_tokens + places % rows.page_tokens
                attended[first : first + count] = F.scaled_dot_product_attention(
                    query[first : first + count].transpose(0, 1)[None],
                    keys[None, :, slots],
                    values[None, :, slots],
                    attn_mask=places <= position + torch.arange(count)[:, None],
                    scale=scaling,
                    enable_gqa=True,
                )[0].transpose(0, 1)
        return attended


class TorchChoices:
    """`ChoiceKernels`."""

    def choose_rows(self, logits: torch.Tensor, rules: RowRules, positions: torch.Tensor) -> torch.Tensor:
        chosen = []
        for row, (temperature, top_k, top_p, least) in enumerate(rules.numbers.tolist()):
            scores = logits[row : row + 1].double()
            if temperature:
                sampling = SamplingParameters(temperature, int(top_k), top_p, torch.tensor(least).exp().item())
                scores = filtered(logits[row : row + 1] / temperature, sampling).double()
                starts = stream_starts(rules.seeds[row : row + 1], positions[row : row + 1])
                scores = scores + gumbel_at(starts, torch.arange(logits.shape[1]))
            highest, token_id = scores.max(dim=-1)
            chosen.append(torch.where(highest.isfinite(), token_id, NO_TOKEN))
        return torch.cat(chosen)


def device_backend() -> Backend:
    tables = TorchTables()

    def attention(memory: torch.Tensor, group_size: int, plan: BatchPlan) -> TableAttention:
        return TableAttention(memory, planned_rows(plan, group_size, memory.device), tables)

    choices = TorchChoices()
    return Backend(attention, tables=tables, choices=choices, chooser=DeviceChooser(choices))


@contextmanager
def models_of_a_device() -> Iterator[None]:
    """Give models that are loaded inside this backend, so that their short passes have fixed shapes."""
    with patch("paceline.engine.model.loader.find_backend", lambda device: device_backend()):
        yield


def loading(*, fixed_shapes: bool) -> AbstractContextManager[None]:
    return models_of_a_device() if fixed_shapes else nullcontext()
