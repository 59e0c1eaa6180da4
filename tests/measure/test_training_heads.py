"""Heads learn from the features of their target's outputs, every kind of them."""

import random

import pytest
from transformers import AutoModelForCausalLM

from tests.checkpoints import VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.heads import KINDS
from training.features import FrozenTarget
from training.heads import begun_heads, fit_heads, right_shares


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_what_follows(kind: str, pairs: dict[str, PairOfCheckpoints]) -> None:
    module = AutoModelForCausalLM.from_pretrained(pairs["Llama"].target)
    frozen, rng = FrozenTarget(module), random.Random(3)
    prompts = [[rng.randrange(8, VOCABULARY_SIZE) for _ in range(9)] for _ in range(2)]
    outputs = [[*prompt, *[50 + place % 5 for place in range(20)]] for prompt in prompts]
    texts = frozen.features([(output, 9) for output in outputs])
    heads = begun_heads(kind, frozen, 3)
    before = right_shares(heads, frozen, texts)
    fit_heads(heads, frozen, texts, step_count=2)
    assert len(right_shares(heads, frozen, texts, 5)) == len(before) == 3
