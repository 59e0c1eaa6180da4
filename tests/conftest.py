"""The same random numbers in every test, and costly fixtures made once a session.

Fixtures import what takes seconds: a process that hands tests out to others runs none and needs none of it.
"""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# Without a GPU, Triton's kernels run in its interpreter. Triton asks when it is imported, and libraries may do that.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")

import pytest
import structlog

import tests.profiles  # noqa: F401 (loads one)

if TYPE_CHECKING:
    from coordinator.rounds.guarded_planner import GuardedPlanner
    from tests.certificates import Authority
    from tests.services import Models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long tests as slow. Slow tests run first, so that no worker ends with one while the other is idle."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed random numbers regardless of the worker and its earlier tests."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@dataclass(frozen=True)
class PairOfCheckpoints:
    target: Path
    draft: Path


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Use one thread: on few cores more threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def heeded_interrupts() -> None:
    """Heed Ctrl-C, which a shell ignores in the background; commands started by tests would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def plain_tracebacks() -> None:
    """Write tracebacks as services do. The default draws boxes with all variables, a second of a core for each."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@pytest.fixture(scope="session", autouse=True)
def planners_that_fail_fail_tests() -> Iterator[None]:
    """Let a planner's error fail its round, as if nothing guarded it: it costs speed alone, so no test would see it."""
    from coordinator.rounds.guarded_planner import GuardedPlanner

    def failed(self: "GuardedPlanner", words: str, error: Exception) -> NoReturn:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GuardedPlanner, "failed", failed)
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairOfCheckpoints]:
    """Write a tiny random target of each family, with a draft that is often right."""
    from tests.checkpoints import FAMILIES, write_model, write_related_draft

    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        target = write_model(folder / "target", family)
        found[family] = PairOfCheckpoints(target, write_related_draft(folder / "draft", target, family, noise=0.05))
    return found


@pytest.fixture(scope="session")
def models(pairs: dict[str, PairOfCheckpoints], tmp_path_factory: pytest.TempPathFactory) -> Iterator["Models"]:
    """Run processes of two targets, of which the second has heads, and two drafts."""
    from tests.heads import write_random_heads
    from tests.services import Models, model_flags, running_services

    pair = pairs["Llama"]
    heads = write_random_heads(tmp_path_factory.mktemp("models") / "heads", "eagle", pair.target)
    target, draft = model_flags("target_service", pair.target), model_flags("draft_service", pair.draft)
    with_heads = [*target, "--heads", str(heads)]
    with running_services(target, with_heads, draft, draft) as (one, other, first_draft, second_draft):
        yield Models((one, other), (first_draft, second_draft))


@pytest.fixture
def services_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the services of commands in this process."""
    from tests.clusters import cluster_here

    for module in ("paceline.cli.connection", "paceline.measure.cluster"):
        monkeypatch.setattr(f"{module}.running_cluster", cluster_here)


@pytest.fixture
def authority(tmp_path: Path) -> "Authority":
    from tests.certificates import Authority

    return Authority(tmp_path / "authority")
