"""Synthetic pairs: of the requested acceptance, exact like any other pair, and labelled."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.engine.loading import load_model
from paceline.engine.model import weight_files
from paceline.errors import InvalidRequest
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.synthetic.acceptance import count_drafts, measure
from paceline.measure.synthetic.calibration import Trial, part_of
from paceline.measure.synthetic.pair import PairOrder, WrittenPair, output_token_ids, write_pair
from paceline.measure.synthetic.shapes import SHAPES, ModelShape, PairShape
from paceline.measure.synthetic.successors import draw_successors
from paceline.measure.synthetic.weights import parameter_count
from paceline.types import GenerationRequest, TokenIds
from tests.clusters import cluster

TINY = PairShape(
    ModelShape("Llama", 2, 64, 4, 2, 16, 96, 320, 512),
    ModelShape("Llama", 1, 48, 2, 1, 24, 64, 320, 512),
    "float32",
)
FAMILIES = {
    "Llama": TINY,
    "Qwen3": replace(TINY, target=replace(TINY.target, family="Qwen3"), draft=replace(TINY.draft, family="Qwen3")),
    "Glm4": replace(TINY, target=replace(TINY.target, family="Glm4"), draft=replace(TINY.draft, family="Qwen2")),
}


def write(output: Path, shape: PairShape = TINY, *, factor: float | None = 2.0, seed: int = 0) -> WrittenPair:
    return write_pair(PairOrder("tiny", shape, output, 0.7, factor, seed=seed), lambda factor, measured: None)


@pytest.mark.parametrize("family", [*(pytest.param(one, marks=pytest.mark.long) for one in ("Llama", "Qwen3")), "Glm4"])
async def test_the_coordinator_accepts_as_many_drafts_as_were_asked_for_and_outputs_are_exact(
    family: str, tmp_path: Path
) -> None:
    written = write(tmp_path, FAMILIES[family], factor=None)
    assert written.calibration is not None
    assert written.calibration.acceptance.share == pytest.approx(0.7, abs=0.05)
    random = torch.Generator().manual_seed(4)
    prompts = [tuple(torch.randint(320, (length,), generator=random).tolist()) for length in (5, 16, 40) * 4]
    async with cluster(tmp_path / "target", tmp_path / "draft") as running:
        completions = await asyncio.gather(
            *(running.client.complete(GenerationRequest(TokenIds(prompt), 128)) for prompt in prompts)
        )
    usages = [one.finish.usage for one in completions]
    share = sum(one.accepted_count for one in usages) / sum(one.drafted_count for one in usages)
    assert share == pytest.approx(0.7, abs=0.07)
    reference = HuggingFaceReference(str(tmp_path / "target"), "float32")
    for prompt, completion in list(zip(prompts, completions, strict=True))[:4]:
        assert completion.token_ids == reference.generate(prompt, 128)


def test_a_larger_factor_makes_drafts_rarer_right_and_text_depends_on_more_than_the_last_token(tmp_path: Path) -> None:
    shares = []
    for factor in (0.5, 2.0, 8.0):
        successors = draw_successors(list(range(320)), seed=0)
        shares.append(Trial(TINY, successors).acceptance(factor, "a test").share)
    assert shares[0] > 0.95
    assert 0.3 < shares[1] < 0.95
    assert shares[2] < 0.1
    write(tmp_path, factor=3.0)
    reference = HuggingFaceReference(str(tmp_path / "target"), "float32")
    outputs = {tuple(reference.generate((first, 5, 9), 8)) for first in range(20)}
    assert len(outputs) > 5


def test_acceptance_hardly_depends_on_depth_so_a_part_of_a_large_target_tells_its_factor() -> None:
    successors = draw_successors(list(range(320)), seed=0)
    deep = replace(TINY, target=replace(TINY.target, layer_count=8))
    shares = [Trial(shape, successors).acceptance(2.2, "a test").share for shape in (TINY, deep)]
    assert 0.5 < shares[0] < 0.9
    assert shares[1] == pytest.approx(shares[0], abs=0.08)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_weights_in_however_many_files(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        write(tmp_path / name, replace(TINY, dtype=dtype), seed=seed)
        shards = sorted((tmp_path / name / "target").glob("*.safetensors"))
        return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}

    whole, other = weights("whole", seed=1), weights("other", seed=2)
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 50_000)
    parts = weights("parts", seed=1)
    assert len(list((tmp_path / "parts" / "target").glob("*.safetensors"))) > 2
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(whole["lm_head.weight"], other["lm_head.weight"])
    loaded = load_model(str(tmp_path / "parts" / "target"))
    assert loaded.description.dtype == dtype
    assert loaded.description.parameter_count == parameter_count(TINY.target)


def test_a_pair_says_everywhere_that_it_is_synthetic(tmp_path: Path) -> None:
    write(tmp_path)
    for role in ("target", "draft"):
        label = json.loads((tmp_path / role / "config.json").read_text())["synthetic"]
        assert (label["shape"], label["seed"], label["factor"]) == ("tiny", 0, 2.0)
        assert load_model(str(tmp_path / role)).description.model_id == f"{tmp_path / role} (synthetic)"
    assert "no language model" in (tmp_path / "MODEL_CARD.md").read_text()


def test_a_pair_with_room_for_it_carries_the_built_in_tokenizer_and_never_writes_special_tokens(tmp_path: Path) -> None:
    wide = replace(
        TINY, target=replace(TINY.target, vocabulary_size=5000), draft=replace(TINY.draft, vocabulary_size=5000)
    )
    token_ids, has_tokenizer = output_token_ids(wide)
    assert has_tokenizer
    assert (min(token_ids), max(token_ids)) == (4, 4095)
    write(tmp_path, wide)
    target, draft = (load_model(str(tmp_path / role)).description for role in ("target", "draft"))
    assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint != ""
    assert target.vocabulary_size == 5000
    reference = HuggingFaceReference(str(tmp_path / "target"), "float32")
    assert set(reference.generate((1, 4999, 3), 100)) <= set(token_ids)


def test_drafts_are_counted_as_the_coordinator_counts_them() -> None:
    # Rounds of 5: all right and one more, first wrong, two right; the last token needs no draft.
    agrees = [True] * 6 + [False] + [True, True, False] + [True]
    assert count_drafts(agrees) == (5 + 4 + 3 + 0, 5 + 0 + 2)
    assert count_drafts([True] * 6) == (5, 5)
    assert count_drafts([False] * 3) == (2 + 1 + 0, 0)
    assert measure([[True] * 6, [False] * 6]).spread == 0.5


@pytest.mark.parametrize(
    ("name", "target_m", "draft_m"),
    [
        ("100m/5m", 100, 5),
        ("300m/20m", 298, 20),
        ("vicuna-7b/68m", 6738, 68),
        ("qwen3-8b/0.6b", 8191, 752),
        ("glm4-9b/0.6b", 9400, 629),
    ],
)
def test_shapes_have_the_sizes_of_their_models(name: str, target_m: int, draft_m: int) -> None:
    shape = SHAPES[name]
    assert round(parameter_count(shape.target) / 1e6) == target_m
    assert round(parameter_count(shape.draft) / 1e6) == draft_m
    assert shape.target.vocabulary_size == shape.draft.vocabulary_size
    assert part_of(shape, 2, 4096).target.layer_count == 2


def test_what_cannot_be_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidRequest, match="is not empty"):
        write(tmp_path / "full")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        write(tmp_path / "full" / "file" / "pair")
    monkeypatch.setattr("paceline.measure.synthetic.files.free_bytes", lambda device: 1000)
    with pytest.raises(InvalidRequest, match="of memory and 0.0 GiB are free"):
        write(tmp_path / "pair")
    huge = replace(TINY, target=replace(TINY.target, vocabulary_size=10**9))
    with pytest.raises(InvalidRequest, match="GiB of disk are free"):
        write(tmp_path / "pair", huge)
