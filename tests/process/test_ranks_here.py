"""Places that processes are given, and what settings of a model over several processes are refused."""

import os
import re
import sys

import pytest

from draft_service.config import DraftSettings
from paceline.errors import StartupError
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.process.ranks import MEETING, joined_ranks, place_here
from paceline.process.settings import read_settings
from paceline.types import RankGrid, RankPlace
from target_service.config import TargetSettings

FOUR = RankGrid(2, 2)


def given(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", MEETING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_process_takes_the_place_that_torchrun_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")
    assert place_here(FOUR) == RankPlace(3, FOUR, 1)
    assert place_here(RankGrid()) is None
    given(monkeypatch)
    assert place_here(FOUR) is None


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "0"}]
)
def test_a_place_outside_the_grid_is_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **variables)
    with pytest.raises(StartupError, match="take 4 processes, and this is number"):
        place_here(FOUR)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_place_that_is_no_number_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes leaves `$(NAME)` as it is where there is no such variable, and the service ended by a traceback."""
    given(monkeypatch, **({"RANK": "0", "WORLD_SIZE": "4"} | {name: "$(LWS_WORKER_INDEX)"}))
    with pytest.raises(StartupError, match=re.escape(f"{name} is '$(LWS_WORKER_INDEX)'; give a whole number")):
        place_here(FOUR)


def test_places_divide_layers_and_columns_and_follow_each_other() -> None:
    places = [RankPlace(rank, FOUR) for rank in range(4)]
    assert [(one.stage, one.share) for one in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.layers(6) for one in places] == [range(3), range(3), range(3, 6), range(3, 6)]
    assert [one.part(5) for one in places[:2]] == [range(3), range(3, 5)]
    assert [(one.previous_rank, one.next_rank) for one in places] == [(2, 2), (3, 3), (0, 0), (1, 1)]


async def test_a_service_of_one_process_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    async with joined_ranks("target_service", RankGrid()) as ranks:
        assert (ranks.place.rank, ranks.threads(None), ranks.threads(3)) == (0, None, 3)
        assert not ranks.is_broken


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch chooses the address")
@pytest.mark.parametrize(("local_count", "is_on_loopback"), [("4", True), ("2", False), (None, False)])
async def test_ranks_that_torchrun_started_on_one_machine_talk_on_loopback_and_those_of_several_do_not(
    local_count: str | None, is_on_loopback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They listened on the address of the machine's name, in the clear."""
    given(monkeypatch, RANK="1", WORLD_SIZE="4", **({"LOCAL_WORLD_SIZE": local_count} if local_count else {}))
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "eth0")
    async with joined_ranks("target_service", FOUR):
        assert [os.environ[name] for name in names] == ["lo" if is_on_loopback else "eth0"] * 2


def test_a_process_after_the_first_listens_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--port", "7702", "--metrics-port", "7712", "--tensor-parallel", "2"]
    given(monkeypatch, RANK="1", WORLD_SIZE="2")
    assert read_settings(TargetSettings, "target_service", flags).listens == ()
    given(monkeypatch, RANK="0", WORLD_SIZE="2")
    assert [one.port for one in read_settings(TargetSettings, "target_service", flags).listens] == [7702, 7712]


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        (DraftSettings, ["--layout", "dense", "--pipeline-parallel", "2"], "--layout dense cannot be had"),
        (TargetSettings, ["--heads", "builtin:clover", "--tensor-parallel", "2"], "--heads builtin:clover cannot be"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_before_anything_loads(
    kind: type[DraftSettings | TargetSettings], flags: list[str], words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        read_settings(kind, "service", flags)


def test_a_cluster_divides_the_cores_among_the_targets_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.process.cluster_plan.CORES", 8)
    plan = plan_cluster(ClusterOptions(target_tensor_parallel=2, target_pipeline_parallel=2))
    assert plan.draft and plan.draft.settings.grid == RankGrid()
    told = plan.target.settings
    assert (told.grid, told.threads, told.threads_beside_draft) == (FOUR, 2, 1)


@pytest.mark.parametrize(("lanes", "ranks", "threads"), [(1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 4, 1)])
def test_a_cluster_divides_the_drafts_threads_among_the_drafts_processes(
    lanes: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each had as many as were meant for all of them, and the target lacked these cores."""
    monkeypatch.setattr("paceline.process.cluster_plan.CORES", 8)
    monkeypatch.setenv("PACELINE_DRAFT_TENSOR_PARALLEL", str(ranks))
    plan = plan_cluster(ClusterOptions(lanes=lanes))
    assert plan.draft and plan.draft.settings.threads == threads
    assert plan.target.settings.threads_beside_draft == (8 if lanes == 1 else 6)
    monkeypatch.setenv("PACELINE_DRAFT_THREADS", "3")
    plan = plan_cluster(ClusterOptions(lanes=lanes))
    assert plan.draft and plan.draft.settings.threads == 3
