"""Strict numerics: in half precision too, what the target decodes does not depend on drafts or neighbours."""

import random

import pytest
import torch

from paceline.engine.loader import DtypeName, load_model
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.test_exactness import generate, shared_requests

STRICT = EngineOptions(kv_memory="16MiB", numerics="strict")


def logits(runner: Runner, row: PackedRow, *neighbours: PackedRow) -> torch.Tensor:
    outcome = runner.forward([*neighbours, row])[-1]
    assert isinstance(outcome, torch.Tensor)
    return outcome


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Glm4"])
def test_logits_do_not_depend_on_neighbours_chunks_drafts_or_sharing(
    family: str, dtype: DtypeName, pairs: dict[str, PairOfCheckpoints]
) -> None:
    model = load_model(str(pairs[family].target), dtype)
    rng = random.Random(1)
    tokens = tuple(rng.randrange(8, 300) for _ in range(150))
    # Token by token, alone: what plain decoding would see at every position after the first 100.
    plain = Runner(model, STRICT)
    expected = [logits(plain, PackedRow("a", 0, tokens[:100]))]
    expected += [logits(plain, PackedRow("a", n, tokens[n : n + 1])) for n in range(100, 150)]
    for options in (STRICT, EngineOptions(numerics="strict", page_tokens=3, prefill_chunk_tokens=32)):
        runner = Runner(model, options)
        runner.forward([PackedRow("other", 0, tokens[:60])])
        outcome = None
        while not isinstance(outcome, torch.Tensor):
            base = runner.cache.length("b")
            row = PackedRow("b", base, tokens[base:150], draft_count=min(50, 149 - base))
            outcome = runner.forward([PackedRow("n", 0, tokens[7:12]), row, PackedRow("m", 0, tokens[3:70])])[1]
        assert torch.equal(outcome, torch.cat(expected))


@pytest.mark.slow
async def test_bfloat16_speculation_equals_plain_decoding_bit_for_bit(pairs: dict[str, PairOfCheckpoints]) -> None:
    pair = pairs["Llama"]
    prompts = [one for seed in range(6) for one in shared_requests(seed)][:64]
    outputs = []
    for batch_size in (1, 4, 8):
        async with cluster(pair.target, pair.draft, batch_size=batch_size, options=STRICT, dtype="bfloat16") as running:
            for draft_count in (0, 5):
                tokens, usages = await generate(running, prompts, draft_count)
                outputs.append(tokens)
    assert sum(usage.accepted_count for usage in usages) > 300
    assert all(one == outputs[0] for one in outputs)
