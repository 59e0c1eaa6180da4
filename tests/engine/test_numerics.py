"""Strict numerics: in half precision too, neither drafts nor neighbours change the target's tokens."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import structlog
import torch

from draft_service.config import DraftSettings
from paceline.cli.prompts import PROMPTS
from paceline.engine.attention.strict import StrictAttention
from paceline.engine.interfaces import Span
from paceline.engine.loading import load_model
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.plan import BatchPlan
from paceline.engine.runner import Runner
from paceline.errors import StartupError
from paceline.model_service.serving import engine_options
from paceline.numerics import promise
from paceline.process.settings import parse_settings
from paceline.types import (
    Dtype,
    GenerationRequest,
    Layout,
    ModelDescription,
    Numerics,
    PolicyName,
    Quantization,
    UserMessage,
)
from target_service.config import TargetSettings
from tests.checkpoints import FAMILIES, write_model
from tests.cluster.test_exactness import generate, shared_requests
from tests.clusters import cluster
from tests.conftest import PairOfCheckpoints
from tests.fakes.model_services import describe
from tests.tools import NEEDS_ROUNDED_ROWS, built_kernels

STRICT = EngineOptions(kv_memory="16MiB", numerics="strict")


def logits(runner: Runner, row: PackedRow, *neighbours: PackedRow) -> torch.Tensor:
    outcome = runner.forward([*neighbours, row])[-1]
    assert isinstance(outcome, torch.Tensor)
    return outcome


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        *(("bfloat16", "none"), ("float16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("float32", "int8")),
        pytest.param("float32", "w8a8", marks=NEEDS_ROUNDED_ROWS),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_neighbours_chunks_drafts_or_sharing(
    family: str, dtype: Dtype, quantization: Quantization, pairs: dict[str, PairOfCheckpoints]
) -> None:
    model = load_model(str(pairs[family].target), dtype, quantization=quantization)
    rng = random.Random(1)
    tokens = tuple(rng.randrange(8, 300) for _ in range(150))
    # Token by token, alone: plain decoding's view of every position after the first 100.
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


@pytest.mark.review  # B3, in strict attention
@pytest.mark.parametrize("infinite", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_infinity_in_a_later_token_reaches_no_earlier_one(dtype: torch.dtype, infinite: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, 26, 16).to(dtype) for heads in (4, 2, 2))
    (key, value)[infinite][:, 23] = float("inf")
    attended = []
    for count in (26, 23):
        memory, plan = torch.zeros(2, 2, 64, 16, dtype=dtype), BatchPlan([Span("a", 0, count, count)], [range(4)], 16)
        attention = StrictAttention(memory, 2, plan)
        attended.append(attention.attend(0, query[:, :count], key[:, :count], value[:, :count], 0.25))
    assert torch.equal(attended[0][:, :23], attended[1])
    assert not attended[0][:, 23:].isfinite().all()


SYSTEMS = ((1, 0), (1, 5), (8, 5))
"""Batch sizes and draft counts; plain decoding at batch 1 comes first."""


@pytest.mark.review  # B13
@pytest.mark.parametrize(
    "family", [*(pytest.param(one, marks=pytest.mark.long) for one in FAMILIES[:-1]), FAMILIES[-1]]
)
async def test_in_bfloat16_without_flags_every_output_equals_plain_decoding_alone(
    family: str, pairs: dict[str, PairOfCheckpoints]
) -> None:
    # In each family, fast numerics change some of these prompts' outputs, at either batch size.
    prompts = [shared_requests(seed=0)[number] for number in (0, 1, 4, 7, 8, 11)]
    pair = pairs[family]
    outputs = []
    for batch_size, draft_count in SYSTEMS:
        async with cluster(pair.target, pair.draft, batch_size=batch_size, lanes=1, dtype="bfloat16") as running:
            tokens, usages = await generate(running, prompts, draft_count)
            outputs.append(tokens)
    assert sum(usage.accepted_count for usage in usages) > 30
    assert all(one == outputs[0] for one in outputs)


@pytest.mark.review  # B13
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        ("bfloat16", "none"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.long),
        pytest.param("float32", "w8a8", marks=NEEDS_ROUNDED_ROWS),
    ],
)
async def test_the_built_in_pair_where_numbers_are_rounded_equals_plain_decoding_alone_without_flags(
    dtype: Dtype, quantization: Quantization
) -> None:
    # In bfloat16, unquantised, fast numerics change two of these outputs, from token 7 and from token 11 on.
    requests = [GenerationRequest(UserMessage(PROMPTS[number]), max_new_tokens=24) for number in (4, 12, 5, 6)]
    outputs = []
    for batch_size, draft_count in SYSTEMS:
        async with cluster(
            *("builtin:target", "builtin:draft"),
            batch_size=batch_size,
            draft_count=draft_count,
            lanes=1,
            dtype=dtype,
            quantization=quantization,
        ) as running:
            completions = await asyncio.gather(*map(running.client.complete, requests))
            outputs.append([one.token_ids for one in completions])
    assert all(one == outputs[0] for one in outputs)


@pytest.mark.review  # B13
@pytest.mark.parametrize(
    ("dtype", "options", "numerics"),
    [
        ("bfloat16", EngineOptions(), "strict"),
        ("float16", EngineOptions(), "strict"),
        ("float16", EngineOptions(numerics="fast"), "fast"),
        ("float32", EngineOptions(), "fast"),
        ("float32", EngineOptions(numerics="strict"), "strict"),
        ("float16", EngineOptions(layout="dense"), "fast"),
    ],
)
def test_auto_is_strict_in_half_precision_wherever_that_can_be(
    dtype: Dtype, options: EngineOptions, numerics: str, pairs: dict[str, PairOfCheckpoints]
) -> None:
    model = load_model(str(pairs["Llama"].target), dtype)
    assert Runner(model, replace(options, kv_memory="1MiB")).describe().numerics == numerics


@pytest.mark.review  # B13
def test_the_dense_layout_says_where_it_cannot_be_strict(pairs: dict[str, PairOfCheckpoints]) -> None:
    model = load_model(str(pairs["Llama"].target), "float16")
    with structlog.testing.capture_logs() as logs:
        Runner(model, EngineOptions("1MiB", layout="dense"))
        Runner(model, EngineOptions("1MiB", layout="dense", numerics="fast"))
    assert [(one["event"], one["why"][:48]) for one in logs] == [
        ("numerics are fast", "here results in the dense layout depend on the r")
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_of_the_dense_layout_are_those_of_pages_to_the_last_bit(
    dtype: Dtype, pairs: dict[str, PairOfCheckpoints]
) -> None:
    built_kernels()
    model = load_model(str(pairs["Qwen3"].target), dtype)
    dense, paged = (
        Runner(model, EngineOptions("1MiB", layout=layout, numerics="strict")) for layout in get_args(Layout)
    )
    for count, other in ((7, 30), (1, 6), (5, 1), (3, 3)):
        base_length = dense.cache.length("a")
        row = PackedRow("a", base_length, tuple(range(9, 9 + count)), count - 1)
        length = dense.cache.length("b")
        both = dense.forward([row, PackedRow("b", length, tuple(range(50, 50 + other)))])[0]
        alone = paged.forward([row])[0]
        assert isinstance(both, torch.Tensor) and isinstance(alone, torch.Tensor)
        assert torch.equal(both, alone)


async def test_the_papers_policies_in_their_own_layout_equal_plain_decoding_in_bfloat16(
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    built_kernels()
    pair, prompts = pairs["Llama"], [shared_requests(seed=0)[number] for number in (0, 1, 4, 7, 8, 11)]
    async with cluster(pair.target, pair.draft, batch_size=1, lanes=1, dtype="bfloat16") as running:
        expected, _ = await generate(running, prompts, 0)
    options = EngineOptions("64MiB", layout="dense")
    policies: tuple[PolicyName, ...] = ("eqspec", "exspec")
    for policy in policies:
        async with cluster(
            pair.target, pair.draft, batch_size=4, policy=policy, options=options, dtype="bfloat16"
        ) as running:
            assert running.target.describe().numerics == "strict"
            outputs, _ = await generate(running, prompts, 5)
        assert outputs == expected, policy


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return write_model(tmp_path_factory.mktemp("experts"), "Qwen3Moe", **changes)


@pytest.mark.review  # B6
@pytest.mark.parametrize(
    ("dtype", "asked"),
    [("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "strict"), ("float16", "strict"), ("float32", "strict")],
)
def test_a_mixture_of_experts_is_refused_where_it_would_have_to_be_strict(
    dtype: Dtype, asked: Numerics, experts: Path
) -> None:
    with pytest.raises(StartupError, match=r"Qwen3MoeForCausalLM: each expert .* start with --numerics fast"):
        Runner(load_model(str(experts), dtype), EngineOptions("1MiB", numerics=asked))


@pytest.mark.review  # B6
@pytest.mark.parametrize(("dtype", "asked"), [("bfloat16", "fast"), ("float32", "auto"), ("float32", "fast")])
def test_a_mixture_of_experts_runs_in_fast_numerics(dtype: Dtype, asked: Numerics, experts: Path) -> None:
    runner = Runner(load_model(str(experts), dtype), EngineOptions("1MiB", numerics=asked))
    assert runner.describe().numerics == "fast"


@pytest.mark.review  # B13
def test_services_that_are_told_nothing_leave_numerics_to_the_target_and_draft_in_fast_ones() -> None:
    target, draft = parse_settings(TargetSettings, "target_service", []), parse_settings(DraftSettings, "draft", [])
    assert (engine_options(target).numerics, engine_options(draft).numerics) == ("auto", "fast")


MODEL = describe("model")
STRICT_MODEL = replace(MODEL, dtype="bfloat16", numerics="strict")


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (replace(MODEL, dtype="float32"), "fast in float32: output equals Hugging Face"),
        (replace(STRICT_MODEL, device="cpu"), "strict in bfloat16: speculative output equals plain decoding"),
        (
            replace(MODEL, quantization="int8"),
            "fast in float32 with int8 weights: output equals Hugging Face greedy decoding with the int8 weights",
        ),
        (
            replace(MODEL, quantization="w8a8", numerics="strict"),
            "strict in float32 with w8a8 weights: speculative output equals plain decoding, bit for bit",
        ),
        (replace(MODEL, quantization="w8a8"), "fast in float32 with w8a8 weights: rounding decides between"),
        (replace(MODEL, dtype="float16"), "fast in float16: rounding decides between close logits"),
    ],
)
def test_numerics_are_told_in_words(description: ModelDescription, words: str) -> None:
    assert words in promise(description)
