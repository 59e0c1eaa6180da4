"""The three pairs of arXiv 2510.22876, tiny and random, in the forms in which they are published."""

import asyncio
from pathlib import Path

import pytest

from paceline.engine.model.conversion import convert
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.types import GenerationRequest, Text
from tests.clusters import cluster
from tests.published_forms import write_pair

PROMPTS = ("The", "Licensed under the Apache License", "  two spaces", "漢字 🙂\n", "a " * 60)
OUTPUT_COUNT = 24


@pytest.mark.review
@pytest.mark.parametrize("name", ["vicuna", "qwen3", "glm4"])
async def test_a_pair_as_published_gives_hugging_faces_output(name: str, tmp_path: Path) -> None:
    """review D7: pickled weights, sentencepiece tokenizers, and a draft with later added tokens were refused."""
    target, draft = write_pair(tmp_path, name)
    if name == "vicuna":
        for model in (target, draft):
            convert(str(model), model.with_name(f"{model.name}-safetensors"))
        target, draft = (model.with_name(f"{model.name}-safetensors") for model in (target, draft))
    reference = HuggingFaceReference(str(target), "float32")
    prompts = [reference.encode(prompt, chat=False) for prompt in PROMPTS]
    expected = [reference.generate(prompt, OUTPUT_COUNT) for prompt in prompts]
    async with cluster(target, draft, dtype="float32") as running:
        requests = [GenerationRequest(Text(prompt), max_new_tokens=OUTPUT_COUNT) for prompt in PROMPTS]
        completions = await asyncio.gather(*map(running.client.complete, requests))
    assert [one.token_ids for one in completions] == expected
    assert [one.finish.usage.prompt_count for one in completions] == list(map(len, prompts))
    assert sum(one.finish.usage.drafted_count for one in completions) > 0
