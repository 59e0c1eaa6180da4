"""`paceline demo` where it ends early."""

import gc
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.cli import demo
from paceline.client import Client
from paceline.types import OutputPiece
from tests.clusters import cluster_here
from tests.commands import paceline_here


@pytest.fixture(autouse=True)
def _services_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "running_cluster", cluster_here)


def test_a_refused_request_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    status, _, err = paceline_here("demo", "--max-new-tokens", "100000")
    assert status == 1
    assert err.startswith("paceline: max_new_tokens is 100000;") and err.count("\n") == 1
    assert not _forgotten(caplog)


def test_ctrl_c_ends_the_answers_that_are_not_shown_yet_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class InterruptedClient(Client):
        async def generate(self, *arguments: Any, **limits: Any) -> AsyncIterator[OutputPiece]:  # type: ignore[override]
            async for piece in super().generate(*arguments, **limits):
                yield piece
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "Client", InterruptedClient)
    status, _, _ = paceline_here("demo", "--max-new-tokens", "40")
    assert status == 130
    assert not _forgotten(caplog)


def _forgotten(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what asyncio logs of tasks whose failure nobody looked at: a traceback each."""
    gc.collect()
    return [one.getMessage() for one in caplog.records if "never retrieved" in one.getMessage()]
