"""A coordinator that is to have no draft service: it misses none, and says so once."""

import pytest
from structlog.testing import capture_logs

from coordinator.config import CoordinatorSettings
from coordinator.serving import running_coordinator
from paceline.client import Client
from paceline.errors import StartupError
from paceline.observe.metrics import new_registry
from paceline.process.instruments import Instruments
from paceline.process.settings import read_settings
from paceline.types import DraftSource, GenerationRequest, TokenIds
from tests.clusters import cluster, model_server
from tests.conftest import PairOfCheckpoints

REQUEST = GenerationRequest(TokenIds((20, 21, 22)), 12, ignore_end_tokens=True)


async def test_a_coordinator_without_a_draft_service_decodes_plainly_and_says_why_once(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    pair = pairs["Llama"]
    async with cluster(pair.target, pair.draft) as running:
        whole = await running.client.complete(REQUEST)
    with capture_logs() as logs:
        async with model_server("target", pair.target) as target:
            settings = CoordinatorSettings(draft="none", target=target.address)
            async with (
                running_coordinator(settings, Instruments(new_registry("coordinator"))) as server,
                Client(server.address) as client,
            ):
                alone = await client.complete(REQUEST)
                described = await client.describe()
    assert alone.token_ids == whole.token_ids
    assert alone.finish.usage.sources == ()
    assert (described.draft, described.drafts) == (None, ())
    assert described.sources == (DraftSource.SUFFIX, DraftSource.PREDICTION)
    assert [one["log_level"] for one in logs if "draft service" in one["event"]] == ["info"]
    assert not [one for one in logs if one["log_level"] == "warning"]


def test_only_the_draft_may_be_none() -> None:
    with pytest.raises(StartupError, match="--target 'none'"):
        read_settings(CoordinatorSettings, "coordinator", ["--draft", "none", "--target", "none"])
