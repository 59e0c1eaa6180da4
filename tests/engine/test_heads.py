"""Heads in the engine: what they draft over pages and many calls is what their modules give of the whole text."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from paceline.engine.cache.paged import KvPool
from paceline.engine.heads.drafting import MOST_WAITING, HeadsDrafts
from paceline.engine.heads.loading import load_heads
from paceline.engine.heads.reading import new_heads, read_heads, write_heads
from paceline.engine.loading import load_model
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.conversion import convert
from paceline.engine.options import EngineOptions
from paceline.engine.passes import Piece
from paceline.engine.runner import Runner
from paceline.errors import ModelNotUsable, Overloaded, StartupError
from paceline.planning.heads import read_heads_size
from paceline.types import GREEDY, ChoiceRule, Dtype, Prefilled, SamplingParameters, SequenceLength, Verdict, VerifyRow
from target_service.verifier import Verifier
from tests.checkpoints import FAMILIES, write_model
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import loading
from tests.heads import DRAFT_COUNT, KINDS, drafts_of_modules, write_random_heads
from tests.published_heads import drafts_of, drafts_of_eagle3, write_eagle, write_eagle3, write_speculators
from tests.tools import built_kernels, rounds_rows_here

OPTIONS = EngineOptions(kv_memory="1MiB", page_tokens=4)
PROMPT = tuple(range(20, 57))


def verifier_with(folder: Path, target: Path, options: EngineOptions = OPTIONS) -> Verifier:
    model = load_model(str(target))
    return Verifier(Runner(model, options, heads=load_heads(str(folder), model)))


def verified(verifier: Verifier, *rows: VerifyRow) -> list[Verdict]:
    results = verifier.verify(rows)
    assert all(isinstance(one, Verdict) for one in results), results
    return [one for one in results if isinstance(one, Verdict)]


def go_on(
    verifier: Verifier, text: list[int], drafts: Sequence[int] = (), count: int = DRAFT_COUNT, name: str = "a"
) -> Verdict:
    """Verify drafts after a text of which all but the last token are cached, and add what comes of it to the text."""
    row = VerifyRow(name, len(text) - 1, (text[-1],), tuple(drafts), None, propose_count=count)
    (verdict,) = verified(verifier, row)
    text += [*drafts[: verdict.accepted_count], verdict.next_token_id]
    return verdict


def check_drafts(verifier: Verifier, expected: Callable[[list[int]], Sequence[int]]) -> None:
    """Let three tokens be drafted after a prompt, after those drafts, and after wrong ones."""
    (first,) = verified(verifier, VerifyRow("a", 0, PROMPT, (), propose_count=3))
    text = [*PROMPT, first.next_token_id]
    assert first.draft_token_ids == tuple(expected(text))
    for drafts in (first.draft_token_ids, (5, 6)):
        verdict = go_on(verifier, text, drafts)
        assert verdict.draft_token_ids == tuple(expected(text))


@pytest.mark.parametrize("fixed_shapes", [False, True], ids=["ragged", "fixed shapes"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_modules(
    family: str, kind: str, fixed_shapes: bool, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs[family].target
    folder = write_random_heads(tmp_path / "heads", kind, target)
    with loading(fixed_shapes=fixed_shapes):
        verifier = verifier_with(folder, target)
    first, other = verified(
        verifier,
        VerifyRow("a", 0, PROMPT, (), propose_count=DRAFT_COUNT),
        VerifyRow("b", 0, PROMPT[:5], (), propose_count=2),
    )
    text = [*PROMPT, first.next_token_id]
    assert first.draft_token_ids == tuple(drafts_of_modules(folder, target, text))
    assert other.draft_token_ids == tuple(drafts_of_modules(folder, target, [*PROMPT[:5], other.next_token_id], 2))
    for drafts in (first.draft_token_ids, (5, 6), ()):
        verdict = go_on(verifier, text, drafts)
        assert verdict.draft_token_ids == tuple(drafts_of_modules(folder, target, text))
    assert verifier.runner.cache.length("a") == len(text) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_whose_norms_lie_behind_attention_draft_too(kind: str, tmp_path: Path) -> None:
    """Clover's heads ended the start of such a target by a traceback."""
    target = write_model(tmp_path / "target", "Olmo2")
    folder = write_random_heads(tmp_path / "heads", kind, target)
    check_drafts(verifier_with(folder, target), lambda text: drafts_of_modules(folder, target, text, 3))


PUBLISHED: dict[str, Callable[[Path, Path], Path]] = {
    "EAGLE": write_eagle,
    "EAGLE with biases": partial(write_eagle, has_bias=True),
    "speculators": partial(write_speculators, layernorms=False),
    "speculators with norms": partial(write_speculators, layernorms=True),
}


@pytest.mark.parametrize("form", PUBLISHED)
def test_heads_in_the_files_of_others_draft_as_these_say(
    form: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    folder = PUBLISHED[form](tmp_path / "heads", target)
    check_drafts(verifier_with(folder, target), lambda text: drafts_of(folder, target, text, 3))


@pytest.mark.parametrize("fixed_shapes", [False, True], ids=["ragged", "fixed shapes"])
@pytest.mark.parametrize("form", ["EAGLE-3", "speculators", "speculators, normed residual", "speculators, EAGLE 3.1"])
def test_eagle_3_reads_several_layers_and_drafts_some_tokens_only(
    form: str, fixed_shapes: bool, tmp_path: Path
) -> None:
    target = write_model(tmp_path / "target", "Llama", num_hidden_layers=6)
    folder = write_eagle3(
        tmp_path / "heads",
        target,
        is_speculators=form != "EAGLE-3",
        is_residual_normed="normed" in form,
        is_3_1="3.1" in form,
    )
    with loading(fixed_shapes=fixed_shapes):
        verifier = verifier_with(folder, target)
    check_drafts(verifier, lambda text: drafts_of_eagle3(folder, target, text, 3))
    sampled = ChoiceRule(SamplingParameters(temperature=2.0, top_p=0.9, repetition_penalty=1.2), seed=5)
    (verdict,) = verified(verifier, VerifyRow("b", 0, PROMPT, (), sampled, propose_count=3))
    assert all(one % 3 == 1 for one in verdict.draft_token_ids) and len(verdict.draft_token_ids) == 3


def test_eagle_3_for_a_deeper_target_is_refused(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    folder = write_eagle3(tmp_path / "heads", target, is_speculators=True)
    with pytest.raises(ModelNotUsable, match="layers 1, 2, 4, and the target has 2 layers"):
        load_heads(str(folder), load_model(str(target)))


@pytest.mark.parametrize(
    ("named", "entered"),
    # ModelOpt writes the numbers in any order, of a set.
    [([1, 2, 4], (2, 3, 5)), ([4, 1, 2], (2, 3, 5)), ([2, 3, 5], (2, 3, 5)), ([], ())],
)
def test_eagle_3_of_specforge_and_modelopt_names_layers_by_what_comes_out_of_them(
    named: list[int], entered: tuple[int, ...], pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Such heads read what goes into those layers, each one layer too early, and were right less often."""
    folder = write_eagle3(tmp_path / "heads", pairs["Llama"].target, is_speculators=False)
    its_own = {"eagle_aux_hidden_state_layer_ids": named, "use_aux_hidden_state": True}
    rewrite(folder, lambda told: told | {"eagle_config": its_own})
    heads, _ = read_heads(folder)
    assert heads.tapped_layers == entered
    assert read_heads_size(str(folder)).tapped_count == 1 + (len(entered) or 3)


@pytest.mark.parametrize("moved", [-5, 1000])
def test_eagle_3_that_drafts_tokens_of_another_vocabulary_is_refused(moved: int, tmp_path: Path) -> None:
    """It was served, and each verify that asked for its drafts failed."""
    target = write_model(tmp_path / "target", "Llama", num_hidden_layers=6)
    folder = write_eagle3(tmp_path / "heads", target, is_speculators=False)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": weights["d2t"] + moved}, folder / "model.safetensors")
    with pytest.raises(ModelNotUsable, match=f"drafts tokens {1 + moved} to .* outside the target's vocabulary"):
        load_heads(str(folder), load_model(str(target)))


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda told: [told], "cannot be read"),
    "no such layers": (lambda told: told | {"model_type": "gpt2"}, "cannot be read"),
    "layers that are not run": (lambda told: told | {"model_type": "gemma"}, "layer of GemmaForCausalLM"),
    "no attention": (lambda told: told | {"num_attention_heads": 0}, "cannot be read"),
    "no numbers": (lambda told: told | {"eagle_aux_hidden_state_layer_ids": ["a", "b", "c"]}, "cannot be read"),
    "no drafts": (
        lambda told: told | {"speculators_config": {"proposal_methods": [{"speculative_tokens": -2}]}},
        "draft_count is -2; give at least 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_of_heads_is_refused_in_words(case: str, tmp_path: Path) -> None:
    """Most ended the service by a traceback."""
    target = write_model(tmp_path / "target", "Llama", num_hidden_layers=6)
    folder = write_eagle3(tmp_path / "heads", target, is_speculators=False)
    change, words = WRONG[case]
    rewrite(folder, change)
    with pytest.raises(ModelNotUsable, match=words):
        load_heads(str(folder), load_model(str(target)))


def test_what_a_configuration_of_heads_says_nothing_of_may_be_null(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "Llama", num_hidden_layers=6)
    folder = write_eagle3(tmp_path / "heads", target, is_speculators=False)
    rewrite(folder, lambda told: told | {"eagle_config": None, "speculators_config": None})
    loaded = load_heads(str(folder), load_model(str(target)))
    assert loaded and loaded.tapped_count == read_heads_size(str(folder)).tapped_count == 4


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_knows_how_many_layers_heads_keep_and_read(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    folder = write_random_heads(tmp_path, kind, pairs["Llama"].target)
    heads, _ = read_heads(folder)
    layer_count = len(heads.body.layers) if heads.body else 0
    found = read_heads_size(str(folder))
    assert (found.layer_count, found.tapped_count) == (layer_count, 1 if layer_count else 0)
    assert found.draft_count == heads.draft_count == DRAFT_COUNT


def test_a_plan_knows_that_eagle_3_reads_three_layers_more(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "heads", pairs["Llama"].target, is_speculators=True)
    heads, _ = read_heads(folder)
    assert read_heads_size(str(folder)).tapped_count == 1 + len(heads.tapped_layers) == 4


PUBLISHED_ALL: dict[str, Callable[[Path, Path], Path]] = {
    **PUBLISHED,
    "EAGLE-3": partial(write_eagle3, is_speculators=False),
}


@pytest.mark.parametrize("form", PUBLISHED_ALL)
def test_a_plan_counts_the_weights_that_are_loaded(
    form: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """It counted copies of the target's embeddings, which are larger than the rest of published heads."""
    folder = PUBLISHED_ALL[form](tmp_path / "heads", pairs["Llama"].target)
    heads, _ = read_heads(folder)
    found = read_heads_size(str(folder))
    assert found.parameter_count == sum(one.numel() for one in heads.parameters())
    assert found.draft_count == heads.draft_count


def test_features_that_were_taken_in_are_not_kept(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    """An empty rest of a prompt's features kept them all, for each sequence."""
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "clover", target), target)
    (verdict,) = verified(verifier, VerifyRow("a", 0, PROMPT * 4, (), GREEDY, propose_count=2))
    assert verdict.draft_token_ids
    assert verifier.runner._heads
    waiting = verifier.runner._heads._waiting["a"]
    assert waiting.stop == 4 * len(PROMPT) and not waiting.features.untyped_storage().nbytes()


def test_pickled_heads_are_converted_first(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    model = load_model(str(target))
    pickled = write_eagle(tmp_path / "pickled", target, is_pickled=True)
    with pytest.raises(ModelNotUsable, match="paceline convert"):
        load_heads(str(pickled), model)
    convert(str(pickled), tmp_path / "heads")
    assert load_heads(str(tmp_path / "heads"), model)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_while_nothing_is_asked_for(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", kind, target)
    verifier = verifier_with(folder, target)
    (first,) = verified(verifier, VerifyRow("a", 0, PROMPT, ()))
    assert not first.draft_token_ids
    text = [*PROMPT, first.next_token_id]
    for _ in range(MOST_WAITING + 9):
        go_on(verifier, text, (5, 6), count=0)
    assert go_on(verifier, text).draft_token_ids == tuple(drafts_of_modules(folder, target, text))
    # What is rolled back and comes again is taken in again.
    verifier.runner.rollback([SequenceLength("a", len(PROMPT) + 2)])
    again = VerifyRow("a", len(PROMPT) + 2, tuple(text[len(PROMPT) + 2 : -1]), (), None, propose_count=DRAFT_COUNT)
    (verdict,) = verified(verifier, again)
    assert verdict.next_token_id == text[-1]
    assert verdict.draft_token_ids == tuple(drafts_of_modules(folder, target, text))


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, prefill_chunk_tokens=10),
        replace(OPTIONS, numerics="strict"),
        replace(OPTIONS, page_tokens=40, prefix_sharing=False),
    ],
    ids=["chunks", "strict", "no sharing"],
)
def test_a_prompt_in_parts_and_a_shared_one_draft_alike(
    options: EngineOptions, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", "eagle", target)
    verifier = verifier_with(folder, target, options)
    for name in ("a", "b"):
        base_length = 0
        while True:
            asked = PROMPT[base_length:]
            rule = None if base_length else GREEDY
            (result,) = verifier.verify([VerifyRow(name, base_length, asked, (), rule, propose_count=DRAFT_COUNT)])
            if isinstance(result, Verdict):
                break
            assert isinstance(result, Prefilled)
            base_length = result.cached_length
        expected = drafts_of_modules(folder, target, [*PROMPT, result.next_token_id])
        assert result.draft_token_ids == tuple(expected), name


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "medusa"])
def test_what_goes_on_from_an_ended_sequence_drafts_as_a_new_one_does(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Of the last tokens of an output that asked for no drafts the pages had no keys and values of the heads."""
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", kind, target)
    verifier = verifier_with(folder, target)
    cache = verifier.runner.cache
    assert isinstance(cache, KvPool)
    cache.slots.memory.normal_(std=30)  # others left something in the pages
    (first,) = verified(verifier, VerifyRow("a", 0, PROMPT, (), GREEDY, propose_count=DRAFT_COUNT))
    text = [*PROMPT, first.next_token_id]
    for _ in range(MOST_WAITING - 2):
        go_on(verifier, text, count=0)
    verifier.runner.release(["a"])
    text += [30, 31, 32]
    (second,) = verified(verifier, VerifyRow("b", 0, tuple(text), (), GREEDY, propose_count=DRAFT_COUNT))
    assert second.reused_count > len(PROMPT) + 8
    assert second.draft_token_ids == tuple(drafts_of_modules(folder, target, [*text, second.next_token_id]))


def test_sequences_that_are_freed_at_once_are_taken_in_by_one_pass(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of each reads the layers' weights again: to free 64 took longer than a round."""
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    names = ["a", "b", "c"]
    for number, name in enumerate(names):
        verified(verifier, VerifyRow(name, 0, (20 + number, *range(30, 40)), (), GREEDY, propose_count=0))
    passes = Mock(wraps=verifier.runner.cache.attention)
    monkeypatch.setattr(verifier.runner.cache, "attention", passes)
    assert verifier.runner.release([*names, "unknown"]) == len(names)
    assert passes.call_count == 1


def test_drafts_follow_the_rule_of_their_sequence(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    """A draft is what the heads would choose by the noise that the target draws there."""
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "clover", target), target)
    barred = ChoiceRule(SamplingParameters(logit_bias=((7, 1000.0),)))
    hot = ChoiceRule(SamplingParameters(temperature=50.0), seed=5)
    rows = [
        VerifyRow(name, 0, PROMPT, (), rule, propose_count=DRAFT_COUNT)
        for name, rule in (("barred", barred), ("hot", hot), ("again", hot), ("other", replace(hot, seed=6)))
    ]
    barred_drafts, drafts, again, other = (verified(verifier, row)[0].draft_token_ids for row in rows)
    assert barred_drafts == (7,) * DRAFT_COUNT
    assert drafts == again != other


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_give_no_numbers_cost_drafts_alone(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    config = AutoConfig.from_pretrained(target)
    heads = new_heads(kind, config, draft_count=DRAFT_COUNT)
    with torch.no_grad():
        next(one for name, one in heads.named_parameters() if "norm" not in name).fill_(torch.nan)
    write_heads(heads, config, tmp_path / "heads")
    row = VerifyRow("a", 0, PROMPT, (5, 6), propose_count=DRAFT_COUNT)
    (verdict,) = verified(verifier_with(tmp_path / "heads", target), row)
    (plain,) = verified(Verifier(Runner(load_model(str(target)), OPTIONS)), row)
    assert verdict == plain


@pytest.mark.parametrize("kind", ["clover", "eagle"])
def test_in_half_precision_their_layers_turn_by_the_same_angles(kind: str, tmp_path: Path) -> None:
    """Frequencies were rounded with the weights, and far into a text keys turned otherwise than they had learnt to."""
    target = write_model(tmp_path / "target", "Llama")
    folder = write_random_heads(tmp_path / "heads", kind, target)
    cosines = []
    for dtype in ("float32", "bfloat16"):
        heads = load_heads(str(folder), load_model(str(target), dtype, "cpu"))
        assert heads and heads.layers
        cosines.append(vars(heads.layers)["_rotary"].cos)
    assert torch.equal(*cosines)


class NoWaitingCopies(TorchFunctionMode):
    """Fails where numbers are made a tensor on a device, for which the host waits until the device has done all."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        assert func is not torch.tensor or named.get("device") is None, "it waits for the device"
        return func(*args, **named)


@pytest.mark.parametrize("kind", KINDS)
def test_what_their_passes_are_told_waits_for_no_earlier_kernel(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    with loading(fixed_shapes=True):
        verifier = verifier_with(write_random_heads(tmp_path / "heads", kind, target), target)
    with NoWaitingCopies():
        (first,) = verified(verifier, VerifyRow("a", 0, PROMPT, (), propose_count=DRAFT_COUNT))
        go_on(verifier, [*PROMPT, first.next_token_id], first.draft_token_ids)
    assert len(first.draft_token_ids) == DRAFT_COUNT


@pytest.mark.parametrize("kind", ["clover", "clover2", "eagle"])
@pytest.mark.parametrize("family", FAMILIES)
def test_their_layers_are_compiled_where_the_targets_are(
    family: str, kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs[family].target
    model = load_model(str(target))
    heads = load_heads(str(write_random_heads(tmp_path / "heads", kind, target)), model)
    assert heads and heads.layers
    assert heads.layers.is_compiled == isinstance(model.decoder, CompiledDecoder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["clover", "clover2", "eagle"])
def test_their_layers_give_the_same_bits_at_once_as_call_by_call(
    kind: str, dtype: Dtype, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    built_kernels()
    target, made = pairs["Llama"].target, list[list[torch.Tensor]]()
    folder = write_random_heads(tmp_path / "heads", kind, target)
    for at_once in (True, False):
        model = load_model(str(target), dtype)
        heads = load_heads(str(folder), model)
        assert heads and heads.layers
        if not at_once:
            heads.layers._recorded = None
        assert bool(heads.layers._recorded) == at_once
        verifier, outputs = Verifier(Runner(model, OPTIONS, heads=heads)), list[torch.Tensor]()
        drafts = verifier.runner._heads
        assert drafts
        drafts._layers, drafts._steps = noted(heads.layers, outputs), None
        rows = [VerifyRow(str(n), 0, PROMPT[n:], (5, 6), propose_count=DRAFT_COUNT) for n in range(3)]
        for row, verdict in zip(rows, verified(verifier, *rows), strict=True):
            text = [*row.token_ids, *row.draft_token_ids[: verdict.accepted_count], verdict.next_token_id]
            go_on(verifier, text, verdict.draft_token_ids, name=row.sequence_id)
        made.append(outputs)
    assert all(made)
    for one, same in zip(*made, strict=True):
        assert torch.equal(one, same)


HELD: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
}


@pytest.mark.parametrize("has_norms", [False, True], ids=["", "with norms"])
@pytest.mark.parametrize("held", HELD)
def test_eagle_drafts_the_same_by_one_call_as_place_by_place(
    held: str, has_norms: bool, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    built_kernels()
    if held == "w8a8" and not rounds_rows_here():
        pytest.skip("this processor rounds no rows")
    target, folder = pairs["Llama"].target, tmp_path / "heads"
    write_speculators(folder, target, layernorms=has_norms)
    warm = ChoiceRule(SamplingParameters(temperature=1.5), seed=3)
    barred = ChoiceRule(SamplingParameters(logit_bias=((7, 1000.0),)))  # which one call cannot follow
    asked = {"a": (GREEDY, 2), "b": (warm, 3), "c": (barred, 3), "d": (warm, 1)}
    made = []
    for at_once in (True, False):
        model = load_model(str(target), **HELD[held])
        heads = load_heads(str(folder), model)
        assert heads and heads.steps
        steps = Mock(wraps=heads.steps)
        verifier = Verifier(Runner(model, OPTIONS, heads=replace(heads, steps=steps if at_once else None)))
        rows = [
            VerifyRow(one, 0, PROMPT[n:], (), rule, propose_count=count)
            for n, (one, (rule, count)) in enumerate(asked.items())
        ]
        found = [verified(verifier, *rows)]
        for known in range(1, 4):  # tokens that are committed already
            rows = [
                replace(row, base_length=last.cached_length, token_ids=(last.next_token_id, 5, 6)[:known], rule=None)
                for row, last in zip(rows, found[-1], strict=True)
            ]
            rows = [
                replace(row, draft_token_ids=last.draft_token_ids) for row, last in zip(rows, found[-1], strict=True)
            ]
            found.append(verified(verifier, *rows))
        made.append(found)
        assert steps.drafts.call_count == (4 if at_once else 0)
    assert made[0] == made[1]
    for verdicts in made[0]:
        assert [len(one.draft_token_ids) for one in verdicts] == [2, 3, 3, 1]


def test_a_row_drafts_up_to_the_last_position_beside_one_that_drafts_more(tmp_path: Path) -> None:
    """The verify of both failed: the longer row was taken to grow as far as the other."""
    target = write_model(tmp_path / "target", "Llama", max_position_embeddings=64)
    folder = write_eagle(tmp_path / "heads", target)
    texts = tuple(range(20, 82)), tuple(range(20, 30))
    rows = [VerifyRow(str(n), 0, text, (), propose_count=5) for n, text in enumerate(texts)]
    found = verified(verifier_with(folder, target), *rows)
    for text, one, count in zip(texts, found, (1, 5), strict=True):
        assert one.draft_token_ids == tuple(drafts_of(folder, target, [*text, one.next_token_id], count))


def test_a_row_drafts_from_a_shared_beginning_that_is_taken_in_with_it(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Its first drafts had been made before, from keys and values that nobody had written."""
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", "eagle", target)
    verifier = verifier_with(folder, target, replace(OPTIONS, prefill_chunk_tokens=MOST_WAITING))
    verifier.verify([VerifyRow("a", 0, PROMPT, (), GREEDY)])  # so much may wait
    first, second = verifier.verify(
        [
            VerifyRow("a", MOST_WAITING, PROMPT[MOST_WAITING:], ()),
            VerifyRow("b", 0, PROMPT[: MOST_WAITING + 1], (), GREEDY, propose_count=DRAFT_COUNT),
        ]
    )
    assert isinstance(first, Prefilled) and isinstance(second, Verdict)
    text = [*PROMPT[: MOST_WAITING + 1], second.next_token_id]
    assert second.reused_count and second.draft_token_ids == tuple(drafts_of_modules(folder, target, text))


def noted(layers: Callable[..., torch.Tensor], outputs: list[torch.Tensor]) -> Any:
    def called(*values: Any) -> torch.Tensor:
        outputs.append(layers(*values))
        return outputs[-1]

    return called


@pytest.mark.parametrize(("kind", "product_count"), [("medusa", 1), ("clover", DRAFT_COUNT)])
def test_drafts_that_depend_on_no_others_share_a_product_over_the_vocabulary(
    kind: str, product_count: int, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", kind, target), target)
    drafts, counts = verifier.runner._heads, list[int]()
    assert drafts
    head = drafts._head

    def counted(values: torch.Tensor) -> torch.Tensor:
        counts.append(len(values))
        return head(values)

    drafts._head = counted
    verified(verifier, *(VerifyRow(str(n), 0, PROMPT[n:], (), propose_count=DRAFT_COUNT) for n in range(2)))
    assert (len(counts), sum(counts)) == (product_count, 2 * DRAFT_COUNT)


def test_a_full_cache_leaves_what_needs_no_room(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", "eagle", target)
    token_bytes = load_model(str(target)).kv_shape.token_bytes * 3 // 2
    verifier = verifier_with(folder, target, replace(OPTIONS, kv_memory=str(token_bytes * 8)))
    (verdict,) = verified(verifier, VerifyRow("a", 0, PROMPT[:8], (), propose_count=DRAFT_COUNT))
    expected = drafts_of_modules(folder, target, [*PROMPT[:8], verdict.next_token_id])
    assert verdict.draft_token_ids == tuple(expected[:1])


def test_features_of_a_pass_that_ran_out_of_memory_fail_no_call(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one row were kept, and its sequence then took over what another had computed meanwhile: from then on
    they were fewer than its tokens, and every call failed, of all callers."""
    target = pairs["Llama"].target
    options = replace(OPTIONS, kv_memory="4MiB", prefill_chunk_tokens=4 * MOST_WAITING)
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target, options)
    system = tuple(range(20, 180))
    long, other = VerifyRow("a", 0, (*system, *(7,) * 60), (), GREEDY), (*system, 8)
    verified(verifier, VerifyRow("d", 0, (100,), ()))
    take = HeadsDrafts.take

    def take_one(self: HeadsDrafts, pieces: Sequence[Piece], features: torch.Tensor) -> None:
        take(self, pieces[:1], features[: len(pieces[0].token_ids)])
        raise torch.OutOfMemoryError("no memory for the next one's")

    with monkeypatch.context() as patched:
        patched.setattr(HeadsDrafts, "take", take_one)
        refused = verifier.verify([long, VerifyRow("b", 0, (3, 4), (), GREEDY)])
    assert all(isinstance(one, Overloaded) for one in refused)
    (verdict,) = verifier.verify([VerifyRow("c", 0, other, (), GREEDY)])
    while isinstance(verdict, Prefilled):
        row = VerifyRow("c", verdict.cached_length, other[verdict.cached_length :], ())
        (verdict,) = verifier.verify([row])
    # Others take the chunk: the long one takes over the beginning that is cached now, and computes nothing.
    others = {"d": tuple(range(100, 300)), "e": tuple(range(50, 100))}
    verifier.verify([*(VerifyRow(name, 0, one, (), GREEDY) for name, one in others.items()), long])
    assert verifier.runner.cache.length("a") == len(system)
    verified(verifier, VerifyRow("f", 0, PROMPT, (), propose_count=DRAFT_COUNT))


def test_a_sequence_that_ends_leaves_nothing(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    verifier = verifier_with(write_random_heads(tmp_path / "heads", "eagle", target), target)
    verified(verifier, VerifyRow("a", 0, PROMPT, (), propose_count=DRAFT_COUNT))
    verifier.runner.release(["a"])
    assert verifier.runner.cache.sequence_count == 0
    drafts = verifier.runner._heads
    assert drafts and not drafts._waiting


def test_heads_for_another_target_are_refused(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    target = pairs["Llama"].target
    model = load_model(str(target))
    other = write_model(tmp_path / "other", "Llama", hidden_size=32)
    with pytest.raises(ModelNotUsable, match="hidden_size 32, and the target 64"):
        load_heads(str(write_random_heads(tmp_path / "heads", "medusa", other)), model)
    few = write_model(tmp_path / "few", "Llama", num_key_value_heads=1)
    with pytest.raises(ModelNotUsable, match="num_key_value_heads 1, and the target 2"):
        load_heads(str(write_random_heads(tmp_path / "more", "clover", few)), model)
    with pytest.raises(ModelNotUsable, match="cannot be read"):
        load_heads(str(tmp_path / "missing"), model)
    with pytest.raises(StartupError, match="--layout paged"):
        verifier_with(write_random_heads(tmp_path / "own", "clover", target), target, replace(OPTIONS, layout="dense"))
