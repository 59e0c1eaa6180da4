"""What services say of the cores that they compute on, so that a coordinator knows which share them."""

import os
from pathlib import Path

import pytest
import torch

from paceline.engine.compute import BOOT_ID, compute_of, memory_of
from paceline.types import ComputeDescription

CPU = torch.device("cpu")


def test_services_on_the_same_cores_of_a_host_are_known_by_a_digest_that_does_not_tell_the_host(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.write_text("one boot\n")
    other.write_text("another boot\n")
    described = compute_of(CPU, boot_id=here)
    assert described == compute_of(CPU, boot_id=here)
    assert described.digest != compute_of(CPU, boot_id=other).digest
    assert len(described.digest) == 64
    assert (described.core_count, described.thread_count) == (len(os.sched_getaffinity(0)), torch.get_num_threads())


def test_processes_of_a_host_share_its_memory_and_those_of_two_hosts_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, missing = tmp_path / "boot", tmp_path / "missing"
    boot.write_text("one boot\n")
    here = memory_of(CPU, boot), memory_of(CPU, missing)
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    assert here[0] == memory_of(CPU, boot)
    assert here[1] != memory_of(CPU, missing)
    boot.write_text("another boot\n")
    assert here[0] != memory_of(CPU, boot)


def test_a_system_that_tells_nothing_is_not_known_to_have_room(tmp_path: Path) -> None:
    unknown = compute_of(CPU, boot_id=tmp_path / "missing")
    assert unknown == ComputeDescription()
    assert not unknown.has_room_beside(unknown)
    assert not unknown.has_room_beside(ComputeDescription("cores", 8, 1))


def test_threads_of_all_ranks_count() -> None:
    assert compute_of(CPU, 3).thread_count == 3 * compute_of(CPU).thread_count


@pytest.mark.skipif(not BOOT_ID.exists(), reason="only Linux tells")
def test_a_process_of_other_cores_is_told_apart() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) == 1:
        pytest.skip("there is one core")
    before = compute_of(CPU)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert compute_of(CPU).digest != before.digest
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("draft_threads", "target_threads", "has"), [(1, 2, False), (1, 1, True), (2, 2, False)])
def test_services_that_leave_room_for_each_other_do_not_slow_each_other_down(
    draft_threads: int, target_threads: int, has: bool
) -> None:
    draft, target = (ComputeDescription("cores", 2, count) for count in (draft_threads, target_threads))
    assert draft.has_room_beside(target) is target.has_room_beside(draft) is has
    assert draft.has_room_beside(ComputeDescription("others", 2, target_threads))
