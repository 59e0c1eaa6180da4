"""The benchmark of heads: what it counts is what rounds would gain, and its tables stand beside the paper's."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.heads import accuracy, exact, paper, served
from benchmarks.heads import report as reports
from benchmarks.heads.accuracy import Accuracy
from benchmarks.heads.exact import Exactness
from benchmarks.heads.served import BOTH, PLAIN, SERVICE, Served, ServedRun
from benchmarks.heads.synthetic import synthetic_heads
from benchmarks.heads.variants import NAMES, VARIANTS, begun
from paceline.engine.heads.reading import read_heads
from paceline.measure.synthetic.shapes import ModelShape
from paceline.measure.synthetic.successors import draw_successors
from paceline.measure.synthetic.weights import Recipe, make_module
from paceline.process.cluster_plan import ClusterOptions
from paceline.types import DraftSource
from tests.checkpoints import VOCABULARY_SIZE
from tests.conftest import PairOfCheckpoints
from tests.heads import DRAFT_COUNT, KINDS, drafts_of_modules, write_random_heads
from training.features import FrozenTarget
from training.heads import fit_heads, loss_of, outputs_by_place
from training.outputs import Output


@pytest.mark.parametrize("kind", KINDS)
def test_every_place_is_what_the_heads_would_draft_there(
    kind: str, pairs: dict[str, PairOfCheckpoints], tmp_path: Path
) -> None:
    target = pairs["Llama"].target
    folder = write_random_heads(tmp_path / "heads", kind, target)
    rng = random.Random(5)
    prompt = [rng.randrange(8, VOCABULARY_SIZE) for _ in range(11)]
    drafts = drafts_of_modules(folder, target, prompt)
    frozen = FrozenTarget.read(target)
    heads, _ = read_heads(folder)
    texts = frozen.read_texts([Output((*prompt, *drafts, 9), len(prompt) - 1)])
    (batch,) = texts.one_by_one()
    with torch.inference_mode():
        found = [frozen.logits(one).argmax(-1) for one, _ in outputs_by_place(heads, frozen, batch)]
    # The outputs end with the text; the last row of each place drafts the last token.
    assert [int(one[-2 - (DRAFT_COUNT - 1 - place)]) for place, one in enumerate(found)] == drafts
    counted = accuracy.measure(heads, frozen, texts)
    # The first round's drafts are all right.
    assert counted.extra_tokens >= DRAFT_COUNT / 3


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_clover_learns(name: str, pairs: dict[str, PairOfCheckpoints]) -> None:
    frozen = FrozenTarget.read(pairs["Llama"].target)
    texts = frozen.read_texts([Output((*range(20, 30), *[50 + place % 5 for place in range(20)]), 10)])
    (batch,) = texts.one_by_one()
    torch.manual_seed(3)
    heads = begun(name, frozen, DRAFT_COUNT)
    before = loss_of(heads, frozen, batch)
    fit_heads(heads, frozen, texts, step_count=20)
    assert loss_of(heads, frozen, batch) < before
    assert 0 <= accuracy.measure(heads, frozen, texts).extra_tokens <= DRAFT_COUNT


def test_synthetic_heads_know_what_follows_each_token() -> None:
    successors = draw_successors(list(range(64)), seed=0)
    shape = ModelShape("Llama", 2, 64, 2, 1, 32, 96, 64, 128)
    frozen = FrozenTarget(make_module(Recipe("target", shape, successors, 1.0)))
    place_of = {token_id: place for place, token_id in enumerate(successors.token_ids.tolist())}
    token_ids = [7]
    for _ in range(40):
        token_ids.append(int(successors.token_ids[successors.places[place_of[token_ids[-1]]]]))
    texts = frozen.read_texts([Output(tuple(token_ids), 1)])
    found = accuracy.measure(synthetic_heads(frozen, DRAFT_COUNT), frozen, texts)
    assert min(found.likeliest) > 0.7


def test_each_kind_is_served_without_the_draft_service_and_the_last_system_has_both() -> None:
    heads = {"clover": Path("c"), "medusa": Path("m")}
    systems = served.systems_at(ClusterOptions(), 4, heads, 3)
    found = {name: (one.draft_model, one.heads, one.draft_count) for name, one in systems.items()}
    assert found == {
        PLAIN: ("none", "none", "0"),
        SERVICE: ("builtin:draft", "none", "5"),
        "clover": ("none", "c", "3"),
        "medusa": ("none", "m", "3"),
        BOTH: ("builtin:draft", "c", "auto"),
    }
    assert {(one.batch_size, one.lanes) for one in systems.values()} == {(4, 1)}


def test_nothing_drafts_but_what_a_system_is_named_after() -> None:
    service, heads = DraftSource.DRAFT, DraftSource.HEADS
    found = {name: served.sources_of(name) for name in (SERVICE, "clover", "medusa", BOTH)}
    assert found == {SERVICE: (service,), "clover": (heads,), "medusa": (heads,), BOTH: (service, heads)}


def test_equal_outputs_are_told_with_how_many_drafts_they_had() -> None:
    found = [Exactness("medusa", "float32", 8, 0.8, 480, 479, 0.5)]
    assert exact.Results.validate_json(exact.Results.dump_json(found)) == found
    cells = [cell.strip() for cell in reports.exact_table(found).splitlines()[2].strip("|").split("|")]
    assert cells == ["medusa", "float32", "8", "0.8", "479 of 480", "0.50"]


def test_tables_stand_beside_the_papers() -> None:
    found = {
        name: Accuracy(1_000_000, (0.5, 0.4, 0.3), (0.9 - number / 100, 0.8, 0.7), 1.0)
        for number, name in enumerate(NAMES)
    }
    assert accuracy.Accuracies.validate_json(accuracy.Accuracies.dump_json(found)) == found
    assert "clover over medusa" in reports.ablation_table(found)
    assert reports.accuracy_table(found).count("\n") == len(NAMES) + 2
    results = [
        Served(name, size, 8, (ServedRun(rate, 2.0, 0.5, 8, None),))
        for size in (1, *paper.BATCH_SIZES)
        for name, rate in ((PLAIN, 100.0), ("clover", 150.0))
    ]
    table = reports.served_table(results)
    assert "1.91" in table
    assert "1.50" in table
    assert served.Results.validate_json(served.Results.dump_json(results)) == results


def test_the_papers_ablation_adds_up_to_what_clover_has_over_medusa() -> None:
    sums = tuple(round(sum(column), 1) for column in zip(*paper.LOSSES.values(), strict=True))
    assert sums == paper.TOP_5_OVER_MEDUSA
