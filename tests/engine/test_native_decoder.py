"""A native decoder's passes, made at once, give what their operations give one by one; steps choose as passes do."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.loading import load_model
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.native_decoder import NativeDecoder
from paceline.engine.native import NativeChooser
from paceline.engine.options import EngineOptions
from paceline.engine.passes import FastPasses, Piece
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.engine.sampling import Choosing, choose, ranked
from paceline.engine.steps import StepOutcome, StepRow, Steps
from paceline.engine.threads import using_threads
from paceline.types import GREEDY, ChoiceRule, SamplingParameters
from tests.checkpoints import write_model
from tests.tools import built_kernels

OPTIONS = EngineOptions(kv_memory="1MiB", page_tokens=4)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("Llama", {}, {}),
    "a vocabulary of another size": ("Llama", {"vocab_size": 101}, {}),
    "bfloat16": ("Llama", {}, {"dtype": "bfloat16"}),
    "int8 beside float32": ("Qwen3", {"attention_bias": True}, {"quantization": "int8"}),
    "int8 beside bfloat16": ("Llama", {}, {"dtype": "bfloat16", "quantization": "int8"}),
    "norms behind attention": ("Glm4", {}, {}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES), name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    built_kernels()
    family, changes, loading = request.param
    return load_model(str(write_model(tmp_path_factory.mktemp("model"), family, **changes)), **loading)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    built_kernels()
    return load_model(str(write_model(tmp_path_factory.mktemp("llama"), "Llama")))


def one_by_one(model: LoadedModel) -> LoadedModel:
    """Return the model with a decoder that calls operation by operation."""
    assert isinstance(model.decoder, NativeDecoder)
    return replace(model, decoder=CompiledDecoder(model.decoder.plain, built_kernels()))


def logits(runner: Runner, call: Sequence[PackedRow]) -> Iterator[torch.Tensor]:
    for outcome in runner.forward(call):
        assert isinstance(outcome, torch.Tensor)
        yield outcome


def test_passes_of_all_sizes_give_the_same_bits(model: LoadedModel) -> None:
    runner, other = (Runner(one, OPTIONS) for one in (model, one_by_one(model)))
    tokens = tuple(3 + n * 7 % 90 for n in range(80))
    calls = [
        [PackedRow("a", 0, tokens[:5])],
        [PackedRow("b", 0, tokens[:40]), PackedRow("a", 5, tokens[5:9], draft_count=3)],
        [PackedRow("a", 8, tokens[40:41]), PackedRow("b", 40, tokens[40:44], draft_count=2)],
        [PackedRow("c", 0, tokens[7:80], draft_count=6)],
        [PackedRow("c", 73, (9,)), PackedRow("b", 42, (8, 7), draft_count=1), PackedRow("a", 9, (6,))],
    ]
    for call in calls:
        for one, same in zip(logits(runner, call), logits(other, call), strict=True):
            assert torch.equal(one, same)


class KeptFeatures:
    """Keeps what passes give to heads."""

    def __init__(self, tapped_layers: tuple[int, ...] | None) -> None:
        """Features are wanted of all tokens, and of what goes into these layers; None: of those with logits."""
        self.of_all, self.tapped_layers = tapped_layers is not None, tapped_layers or ()
        self.kept: list[torch.Tensor] = []

    def take(self, pieces: Sequence[Piece], features: torch.Tensor) -> None:
        self.kept.append(features.clone())


@pytest.mark.parametrize("tapped_layers", [None, (), (1, 0, 1)])
def test_features_for_heads_are_the_same_bits(model: LoadedModel, tapped_layers: tuple[int, ...] | None) -> None:
    calls = [
        [PackedRow("a", 0, tuple(range(3, 40))), PackedRow("b", 0, (5, 6, 7), draft_count=1)],
        [PackedRow("b", 3, (8, 9, 10, 11), draft_count=3), PackedRow("a", 37, (4,))],
        [PackedRow("a", 38, (5, 6), following_count=1)],
    ]
    made = []
    for one in (model, one_by_one(model)):
        runner, features = Runner(one, OPTIONS), KeptFeatures(tapped_layers)
        runner.passes = FastPasses(one, runner.cache, features)
        made.append([(runner.forward(call), features.kept[-1]) for call in calls])
    for (outcomes, features), (others, same) in zip(*made, strict=True):
        assert torch.equal(features, same)
        for outcome, other in zip(outcomes, others, strict=True):
            if isinstance(outcome, torch.Tensor):
                assert isinstance(other, torch.Tensor) and torch.equal(outcome, other)


def test_caches_that_take_turns_are_kept_apart(llama: LoadedModel) -> None:
    runners = [Runner(llama, OPTIONS), Runner(llama, replace(OPTIONS, kv_memory="2MiB"))]
    first = [next(logits(one, [PackedRow("a", 0, (index, 5, 6))])) for index, one in enumerate(runners)]
    second = [next(logits(one, [PackedRow("a", 3, (7,))])) for one in runners]
    for index in range(2):
        alone = Runner(one_by_one(llama), OPTIONS)
        assert torch.equal(first[index], next(logits(alone, [PackedRow("a", 0, (index, 5, 6))])))
        assert torch.equal(second[index], next(logits(alone, [PackedRow("a", 3, (7,))])))


def test_more_layers_need_no_more_memory_for_a_pass(tmp_path: Path) -> None:
    built_kernels()
    held = []
    for layer_count in (1, 4):
        folder = tmp_path / str(layer_count)
        model = load_model(str(write_model(folder, "Glm4", num_hidden_layers=layer_count)))
        list(logits(Runner(model, OPTIONS), [PackedRow("a", 0, tuple(range(3, 60)))]))
        assert isinstance(model.decoder, NativeDecoder)
        assert model.decoder._programs._kept
        program = model.decoder._programs._kept[1]._program
        assert program
        tensors = {one.data_ptr(): one.nbytes for one in program._held if isinstance(one, torch.Tensor)}
        held.append(sum(tensors.values()))
    assert held[0] == held[1]


def chosen(model: LoadedModel, calls: Sequence[Sequence[StepRow]], *, at_once: bool) -> list[list[StepOutcome]]:
    """Return what the steps choose, and check what the cache holds afterwards."""
    runner = Runner(model, OPTIONS)
    if not at_once:
        runner.passes = FastPasses(model, runner.cache)
    steps, found = Steps(runner), []
    for call in calls:
        assert all(steps.can_run_at_once(one) == at_once for one in call)
        found.append(steps.run(call))
        for one, outcome in zip(call, found[-1], strict=True):
            assert isinstance(outcome, list)
            kept = [*one.row.token_ids, *outcome[:-1]]
            assert [*runner.cache.token_ids(one.row.sequence_id)[one.row.base_length :]] == kept
    return found


def sampled(seed: int, temperature: float = 0.8) -> ChoiceRule:
    return ChoiceRule(SamplingParameters(temperature), seed=seed)


def test_steps_choose_what_passes_one_by_one_choose(model: LoadedModel) -> None:
    rows = [
        StepRow(PackedRow("a", 0, (5, 6, 7)), GREEDY, 3),
        StepRow(PackedRow("b", 0, (8,)), sampled(1), 7),
        StepRow(PackedRow("c", 0, tuple(range(9, 25))), sampled(2**64 - 3, 1.7), 1),
        StepRow(PackedRow("d", 0, (9, 8)), GREEDY, 7),
    ]
    later = [StepRow(PackedRow("b", 4, (3,)), sampled(1), 2), StepRow(PackedRow("a", 2, (4, 5)), GREEDY, 6)]
    found = chosen(model, [rows, later], at_once=True)
    assert found == chosen(model, [rows, later], at_once=False)
    with using_threads(3):
        assert chosen(model, [rows, later], at_once=True) == found


@pytest.mark.parametrize("rule", [GREEDY, sampled(3)])
def test_ranked_steps_say_what_passes_one_by_one_would_rank(model: LoadedModel, rule: ChoiceRule) -> None:
    ranking, passing = Runner(model, OPTIONS), Runner(model, OPTIONS)
    rows = [
        StepRow(PackedRow("a", 0, (5, 6, 7)), rule, 2),
        StepRow(PackedRow("b", 0, (8,)), rule, 4),
        StepRow(PackedRow("c", 0, (9, 8)), rule, 1),
    ]
    for one, outcome in zip(rows, Steps(ranking).ranked(rows, 6), strict=True):
        assert isinstance(outcome, list)
        assert len(outcome) == one.count
        length, row = 0, one.row
        for place in outcome:
            (logits,) = passing.forward([row])
            assert isinstance(logits, torch.Tensor)
            length += len(row.token_ids)
            prefix = passing.cache.token_ids(row.sequence_id)
            assert passing.ranked([passing.choosing(row.sequence_id, logits, rule, prefix)], 6) == [[place]]
            row = PackedRow(row.sequence_id, length, (place[0].token_id,))
        assert ranking.cache.token_ids(row.sequence_id) == passing.cache.token_ids(row.sequence_id)


def test_steps_reach_the_last_position_beside_a_row_of_more_steps(tmp_path: Path) -> None:
    """The longer row was taken to grow as far as the other, and the call failed."""
    built_kernels()
    model = load_model(str(write_model(tmp_path, "Llama", max_position_embeddings=32)))
    rows = [
        StepRow(PackedRow("a", 0, tuple(range(20, 34))), GREEDY, 2),
        StepRow(PackedRow("b", 0, (8, 9)), GREEDY, 20),
    ]
    assert chosen(model, [rows], at_once=True) == chosen(model, [rows], at_once=False)


def test_a_row_ends_where_no_token_can_be_chosen_and_the_others_go_on(llama: LoadedModel) -> None:
    decoder = llama.decoder
    assert isinstance(decoder, NativeDecoder)
    rows = [StepRow(PackedRow(name, 0, (first,)), GREEDY, 5) for name, first in (("a", 5), ("b", 6), ("c", 7))]
    whole = chosen(llama, [rows], at_once=True)[0]
    third = whole[1]
    assert isinstance(third, list)
    vector = decoder.plain.embedding[third[2]].clone()
    try:
        decoder.plain.embedding[third[2]] = float("nan")
        found = chosen(llama, [rows], at_once=True)[0]
        ranked = Steps(Runner(llama, OPTIONS)).ranked(rows, 4)
    finally:
        decoder.plain.embedding[third[2]] = vector
    assert found[1] == third[:3]
    assert [len(one) for one in ranked if isinstance(one, list)][1] == 3
    for outcome, before in zip(found, whole, strict=True):
        assert isinstance(outcome, list)
        assert isinstance(before, list)
        assert outcome == before[: len(outcome)]


def test_rules_with_more_than_a_temperature_and_long_rows_go_one_by_one(llama: LoadedModel) -> None:
    steps = Steps(Runner(llama, OPTIONS))

    def is_at_once(sampling: SamplingParameters, token_count: int = 2, following: int = 0) -> bool:
        row = PackedRow("a", 0, tuple(range(token_count)), following_count=following)
        return steps.can_run_at_once(StepRow(row, ChoiceRule(sampling), 3))

    assert is_at_once(SamplingParameters(0.8), 15)
    assert not is_at_once(SamplingParameters(0.8, top_k=3))
    assert not is_at_once(SamplingParameters(logit_bias=((4, 1.0),)))
    assert not is_at_once(SamplingParameters(), 100)
    assert not is_at_once(SamplingParameters(), following=1)


CHOICES = {
    "size": st.sampled_from([1, 7, 16, 100, 4099]),
    "spread": st.sampled_from([0.0, 0.5, 6.0]),
    "temperature": st.sampled_from([0.0, 0.05, 1.0, 1.7]),
    "seed": st.integers(0, 2**64 - 1),
    "odd": st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
}
"""Logits of a vocabulary, one of them odd, and the rule."""


@settings(max_examples=60)
@given(length=st.integers(1, 5000), **CHOICES)
def test_choices_are_those_of_the_rule(
    size: int, spread: float, temperature: float, seed: int, length: int, odd: float | None
) -> None:
    rules = [ChoiceRule(SamplingParameters(temperature), seed, 1, (0,)), GREEDY]
    logits = [torch.randn(rows, size, generator=torch.Generator().manual_seed(length)) * spread for rows in (2, 3)]
    if odd is not None:
        logits[0][1, seed % size] = odd
    sequences = [
        Choosing(own, rule, range(length + row), (0,) * (len(own) - 1))
        for row, (own, rule) in enumerate(zip(logits, rules, strict=True))
    ]
    with using_threads(2):
        found = choose(sequences, NativeChooser(built_kernels()))
    for own, alone in zip(found, choose(sequences), strict=True):
        assert [*map(str, own)] == [*map(str, alone)]


@settings(max_examples=60)
@given(count=st.sampled_from([1, 3, 8]), **CHOICES)
def test_ranked_tokens_are_those_of_the_rule(
    size: int, spread: float, temperature: float, seed: int, count: int, odd: float | None
) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(count)) * spread
    if odd is not None:
        logits[1, seed % size] = odd
    one = Choosing(logits, ChoiceRule(SamplingParameters(temperature), seed), (1, 2), (3,))
    ((first, second),) = ranked([one], count, NativeChooser(built_kernels()))
    for place, expected in zip((first, second), ranked([one], count)[0], strict=True):
        # Of equals any may be told, but for the choice.
        assert [token.token_id for token in place[:1]] == [token.token_id for token in expected[:1]]
        assert [one.probability for one in place] == pytest.approx([one.probability for one in expected], abs=1e-6)
        if spread:
            assert [one.token_id for one in place] == [one.token_id for one in expected]


def test_rules_with_filters_are_chosen_for_by_torch_beside_others() -> None:
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1))
    rules = [sampled(3), ChoiceRule(SamplingParameters(0.8, top_k=3), 4), sampled(5)]
    sequences = [Choosing(own, rule, (1, 2), (3,)) for own, rule in zip(logits, rules, strict=True)]
    chooser = NativeChooser(built_kernels())
    assert [chooser.knows(rule) for rule in rules] == [True, False, True]
    assert choose(sequences, chooser) == choose(sequences)
    assert choose([], chooser) == []
