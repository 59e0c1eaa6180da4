"""Heads learn from the features of their target's outputs, every kind of them."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.engine.heads.reading import WEIGHTS
from paceline.errors import InvalidRequest
from tests.checkpoints import VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.heads import KINDS
from training.__main__ import app, parted
from training.features import FrozenTarget, texts_of
from training.heads import begun_heads, fit_heads, outputs_by_place, right_shares
from training.outputs import Output


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_what_follows(kind: str, pairs: dict[str, PairOfCheckpoints]) -> None:
    module = AutoModelForCausalLM.from_pretrained(pairs["Llama"].target)
    frozen, rng = FrozenTarget(module), random.Random(3)
    prompts = [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(9)] for _ in range(2)]
    outputs = [[*prompt, *[50 + place % 5 for place in range(20)]] for prompt in prompts]
    texts = frozen.read_texts([Output(tuple(output), 9) for output in outputs])
    heads = begun_heads(kind, frozen, 3)
    before = right_shares(heads, frozen, texts)
    fit_heads(heads, frozen, texts, step_count=2)
    after = right_shares(heads, frozen, texts, (1, 5))
    assert len(before[1]) == len(after[1]) == len(after[5]) == 3
    assert all(one <= five for one, five in zip(after[1], after[5], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_side_by_side_are_learnt_as_each_alone(kind: str, pairs: dict[str, PairOfCheckpoints]) -> None:
    """Padding and other texts change nothing that heads make of a text."""
    frozen, rng = FrozenTarget.read(pairs["Llama"].target), random.Random(3)
    outputs = [
        Output(tuple(rng.randrange(8, VOCABULARY_SIZE) for _ in range(length)), prompt_count)
        for length, prompt_count in ((30, 9), (12, 2), (5, 4), (3, 1))
    ]
    texts = frozen.read_texts(outputs)
    heads = begun_heads(kind, frozen, 3)
    together = texts.batch(texts.rows)
    width = together.token_ids.shape[1]
    with torch.inference_mode():
        made = list(outputs_by_place(heads, frozen, together))
        for line, alone in enumerate(texts.one_by_one()):
            for place, (output, wanted) in enumerate(outputs_by_place(heads, frozen, alone)):
                own = made[place][1] // width == line
                assert (made[place][1][own] - line * width).tolist() == wanted.tolist()
                torch.testing.assert_close(made[place][0][own], output, rtol=1e-3, atol=1e-3)


def test_training_goes_on_from_earlier_heads(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> None:
    outputs = tmp_path / "outputs.json"
    outputs.write_text(json.dumps([{"token_ids": [*range(20, 40)], "prompt_count": 9}]))
    asked = ["heads", "--target", str(pairs["Llama"].target), "--outputs", str(outputs), "--kind", "eagle"]
    first, second = tmp_path / "first", tmp_path / "second"
    going_on = ["--folder", str(second), "--steps", "0", "--start-from", str(first)]
    for more in (["--folder", str(first), "--steps", "2"], going_on):
        result = CliRunner().invoke(app, [*asked, *more])
        assert result.exit_code == 0, result.output
    before, after = load_file(first / WEIGHTS), load_file(second / WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("outputs", "complaint"),
    [
        ([], "has no outputs to learn from"),
        ([{"token_ids": [20, 21], "prompt_count": 1}], "no outputs of 3 tokens"),
        (
            [{"token_ids": [20, 21, VOCABULARY_SIZE], "prompt_count": 1}],
            f"token id {VOCABULARY_SIZE}, and the target",
        ),
    ],
    ids=["none", "too short", "another vocabulary"],
)
def test_heads_that_cannot_learn_from_outputs_are_refused(
    outputs: list[object], complaint: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Batches of nothing have no end."""
    (tmp_path / "outputs.json").write_text(json.dumps(outputs))
    with pytest.raises(InvalidRequest, match=complaint):
        texts_of(FrozenTarget.read(pairs["Llama"].target), tmp_path / "outputs.json", None)


def test_features_of_other_tokens_or_of_another_target_are_refused(
    pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    """Heads learnt nothing from them, and accuracies counted on them meant nothing."""
    pair, outputs, features = pairs["Llama"], tmp_path / "outputs.json", tmp_path / "features.safetensors"
    frozen = FrozenTarget.read(pair.target)

    def texts(target: FrozenTarget, *token_ids: range) -> torch.Tensor:
        outputs.write_text(json.dumps([{"token_ids": [*one], "prompt_count": 2} for one in token_ids]))
        return texts_of(target, outputs, features).features

    made = texts(frozen, range(20, 30), range(40, 49))
    torch.testing.assert_close(texts(frozen, range(20, 30)), made[:10])
    for wrong in ((frozen, range(20, 30), range(41, 50)), (FrozenTarget.read(pair.draft), range(20, 30))):
        with pytest.raises(InvalidRequest, match=r"--features .* of other tokens .* or of another target; delete it"):
            texts(*wrong)


def test_heads_are_tried_with_prompts_that_they_do_not_learn(pairs: dict[str, PairOfCheckpoints]) -> None:
    frozen = FrozenTarget.read(pairs["Llama"].target)
    texts = frozen.read_texts([Output((20 + number % 10, 30, 31), 1) for number in range(40)])
    held, learnt = parted(texts, seed=1)
    asked = {texts.prompt(row) for row in held.rows}
    assert len(asked) == 1 and len(learnt) == 4 * 9
    assert not asked & {texts.prompt(row) for row in learnt.rows}
