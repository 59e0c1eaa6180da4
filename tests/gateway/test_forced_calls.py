"""Calls that a request forces, over a real engine: each is one of its tools', whatever the model would rather say."""

import asyncio
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from paceline.gateway.config import GatewaySettings
from paceline.gateway.serving import running_gateway
from paceline.gateway.tool_calls import ToolFormat
from paceline.process.instruments import Instruments
from tests.checkpoints import write_model, write_related_draft
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.called_tools import NAMED, TEMPLATE, TOOLS, is_of_a_tool
from tests.fakes.scripted_generator import CHAT
from tests.fakes.tokenizers import byte_tokenizer

END = 256


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairOfCheckpoints:
    """Write a random pair with a chat template."""
    folder = tmp_path_factory.mktemp("calls")
    target = write_model(folder / "target", "Llama", eos_token_id=END)
    draft = write_related_draft(folder / "draft", target, "Llama", noise=0.05)
    for one in (target, draft):
        byte_tokenizer().save(str(one / "tokenizer.json"))
        (one / "chat_template.jinja").write_text(TEMPLATE)
    return PairOfCheckpoints(target, draft)


async def asked(http: httpx2.AsyncClient, seed: int, choice: Any, max_draft_count: int | None) -> Any:
    """Return the choice of an answer with one call, sampled by a seed."""
    body = {
        "messages": [{"role": "user", "content": f"{seed}?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "return_token_ids": True,
        "seed": seed,
        "max_tokens": 120,
        "paceline": {"max_draft_count": max_draft_count},
    }
    answer = (await http.post(CHAT, json=body)).json()
    return answer["choices"][0]


@pytest.mark.parametrize("form", ["hermes", "llama3-json"])
async def test_a_forced_call_is_always_one_and_the_same_with_drafts_and_without(
    form: ToolFormat, pair: PairOfCheckpoints
) -> None:
    async with cluster(pair.target, pair.draft) as running:
        settings = GatewaySettings(coordinator=running.coordinator_address, port=0, tool_format=form)
        async with (
            running_gateway(settings, Instruments(CollectorRegistry())) as address,
            httpx2.AsyncClient(base_url=f"http://{address}", timeout=120) as http,
        ):
            choices = ["required"] * 8 + [NAMED] * 8
            drafted = await asyncio.gather(*(asked(http, seed, one, None) for seed, one in enumerate(choices)))
            plain = await asyncio.gather(*(asked(http, seed, one, 0) for seed, one in enumerate(choices)))
    assert [one["token_ids"] for one in drafted] == [one["token_ids"] for one in plain]
    for one in drafted:
        assert one["finish_reason"] == "tool_calls"
        assert one["message"]["content"] is None
        (call,) = one["message"]["tool_calls"]
        assert is_of_a_tool(call)
    assert {one["message"]["tool_calls"][0]["function"]["name"] for one in drafted[8:]} == {"add"}
