"""Memory of a GPU, of which torch keeps what was freed: here a fake of torch's functions."""

from collections import defaultdict
from threading import get_ident

import pytest
import torch

from paceline.engine import loading
from paceline.engine.memory import kv_memory_bytes
from paceline.engine.ranks.group import Group
from tests.conftest import PairOfCheckpoints
from tests.engine.test_ranks import OPTIONS, SHARES
from tests.fakes.threaded_ranks import loaded_on_ranks

GIB = 1 << 30


class Gpu:
    """A device of which torch keeps bytes that no tensor uses."""

    def __init__(self, free_bytes: int, kept_bytes: int) -> None:
        self._free_bytes, self._kept_bytes = free_bytes, kept_bytes

    def empty_cache(self) -> None:
        self._free_bytes, self._kept_bytes = self._free_bytes + self._kept_bytes, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self._free_bytes, 80 * GIB


def test_a_share_of_a_gpu_is_of_what_loading_left_to_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks, which record no passes, gave back nothing: the cache would have got 18 GiB of 30."""
    gpu = Gpu(30 * GIB, kept_bytes=20 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", gpu.empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", gpu.mem_get_info)
    assert kv_memory_bytes("60%", torch.device("cuda")) == 30 * GIB


def test_ranks_keep_nothing_of_what_was_freed_when_any_counts_what_is_free(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, share_memory = defaultdict[int, list[str]](list), Group.share_memory

    def noted(group: Group, memory: str) -> None:
        done[get_ident()].append("knows who shares its memory")
        share_memory(group, memory)

    monkeypatch.setattr(loading, "give_back_to", lambda device: done[get_ident()].append("gave back"))
    monkeypatch.setattr(Group, "share_memory", noted)
    with loaded_on_ranks(pairs["Llama"].target, SHARES, OPTIONS):
        assert [*done.values()] == [["gave back", "knows who shares its memory"]] * 2
