"""The output of `paceline generate` for a given answer."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from typer.testing import CliRunner

from paceline.cli import generate
from paceline.cli.app import app
from paceline.client import Client
from paceline.types import ClusterDescription, TokenIds
from tests.coordinators import fake_cluster
from tests.fakes.model_services import FakeDrafter, FakeVerifier, continuation

PROMPT = (5, 6, 7)
pytestmark = pytest.mark.review


@pytest.fixture(autouse=True)
def _silent_coordinator() -> Iterator[None]:
    """Keep the coordinator's log, which in use is in another process, out of the command's output."""
    with capture_logs():
        yield


@pytest.fixture(autouse=True)
def _fake_models(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(*_: Any, **__: Any) -> AsyncIterator[tuple[Client, ClusterDescription]]:
        async with fake_cluster(FakeDrafter(0.7), FakeVerifier(), CollectorRegistry()) as client:
            yield client, await client.describe()

    monkeypatch.setattr(generate, "connected", connected)
    # The fake models have no tokenizer.
    monkeypatch.setattr(generate, "as_prompt", lambda *_: TokenIds(PROMPT))


def test_json_is_one_object_with_tokens_finish_and_seed() -> None:
    """review G11"""
    result = CliRunner().invoke(app, ["generate", "hello", "--json", "--max-new-tokens", "6", "--seed", "3"])
    assert result.exit_code == 0, result.exception
    answer = json.loads(result.stdout)
    assert answer["token_ids"] == continuation(PROMPT, 6)
    assert answer["seed"] == 3
    assert answer["usage"]["output_count"] == len(answer["token_ids"])


def test_the_summary_tells_the_speed() -> None:
    """review G11"""
    result = CliRunner().invoke(app, ["generate", "hello", "--max-new-tokens", "6"])
    assert "tokens/s)" in result.stderr
