"""Outputs that clients expect: the tokens are the target's whatever is expected."""

import asyncio

import pytest

from paceline.cli.prompts import SHOWN
from paceline.errors import InvalidRequest
from paceline.measure.prompts import read_text_codec
from paceline.types import DraftingOptions, DraftSource, GenerationRequest, Prediction, Text, TokenIds, UserMessage
from tests.clusters import cluster

pytestmark = pytest.mark.slow


async def test_no_expected_output_and_no_choice_of_sources_changes_a_token() -> None:
    codec = read_text_codec("builtin:target", "builtin:draft")
    async with cluster("builtin:target", "builtin:draft") as running:
        requests = [GenerationRequest(UserMessage(prompt), 40) for prompt in SHOWN]
        end_token_ids = (await running.client.describe()).target.end_token_ids
        wholes = await asyncio.gather(*map(running.client.complete, requests))
        expected: list[Prediction | None] = [
            None,
            Text(wholes[0].text),
            Text("<|end|>" + wholes[0].text.swapcase() * 50),
            TokenIds(tuple(wholes[0].token_ids[3:])),
            TokenIds((0, 1, 2, 3) * 40),
        ]
        for prediction in expected:
            for sources in ((), (DraftSource.PREDICTION,), (DraftSource.SUFFIX, DraftSource.DRAFT)):
                request = GenerationRequest(
                    *(UserMessage(SHOWN[0]), 40),
                    drafting=DraftingOptions(sources, in_order=bool(sources)),
                    predicted_output=prediction,
                )
                assert (await running.client.complete(request)).token_ids == wholes[0].token_ids
        with pytest.raises(InvalidRequest, match="predicted_output.token_ids holds 99999999"):
            await running.client.complete(GenerationRequest(Text("a"), predicted_output=TokenIds((99_999_999,))))
    for prompt, whole in zip(SHOWN, wholes, strict=True):
        own = [one for one in whole.token_ids if one not in end_token_ids]
        # A client that expects exactly what comes has its text read as the very tokens of the output.
        assert codec.encode_continuation(whole.text, codec.encode(UserMessage(prompt))) == own
