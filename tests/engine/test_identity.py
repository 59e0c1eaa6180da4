"""When two loaded models count as one, and their services' descriptions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coordinator.door.served import check_same_model
from paceline.engine.attention.common import ATTENTION_NAME
from paceline.engine.loading import as_loaded, load_model
from paceline.engine.model.identity import origin_of_files
from paceline.engine.options import EngineOptions
from paceline.engine.runner import Runner
from paceline.errors import IncompatiblePair, ModelNotUsable
from paceline.types import ModelDescription
from tests.checkpoints import edit_config
from tests.conftest import PairOfCheckpoints
from tests.fakes.device_kernels import models_of_a_device

pytestmark = pytest.mark.review  # C1

WEIGHTS = "model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Change = Callable[[Path], Any]


@pytest.fixture
def checkpoint(pairs: dict[str, PairOfCheckpoints], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pairs["Llama"].target, tmp_path / "checkpoint"))


def described(model: Path, **options: Any) -> ModelDescription:
    dtype, quantization = options.pop("dtype", "auto"), options.pop("quantization", "none")
    return Runner(load_model(str(model), dtype, quantization=quantization), EngineOptions("1MiB", **options)).describe()


def change_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def write_sharded(folder: Path) -> None:
    """Write it as one shard with an index, the form of larger models."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        write_sharded,
        lambda folder: (folder / "consolidated.safetensors").write_bytes(b"what nobody reads"),
        lambda folder: edit_config(folder, transformers_version="9.9", _name_or_path="elsewhere"),
    ],
)
def test_the_same_weights_are_one_model_at_any_path_and_under_any_name(
    change: Change, checkpoint: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    change(other)
    one, same = described(checkpoint), described(other)
    assert one.identity.model_digest == same.identity.model_digest != ""
    assert one.identity.incarnation != same.identity.incarnation


@pytest.mark.parametrize("index", ["{half", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}'])
def test_an_index_that_names_no_files_is_refused_by_name(index: str, checkpoint: Path) -> None:
    write_sharded(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotUsable, match=r"model\.safetensors\.index\.json does not name the files"):
        load_model(str(checkpoint))


def test_a_shard_that_is_not_there_is_said_to_be_missing(checkpoint: Path) -> None:
    write_sharded(checkpoint)
    (checkpoint / "model-00001-of-00001.safetensors").rename(checkpoint / "elsewhere.safetensors")
    with pytest.raises(ModelNotUsable, match=r"cannot be read, perhaps half written: .*00001-of-00001"):
        load_model(str(checkpoint))


def add_template_for_tools(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("another")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights_digest", change_weight),
        ("configuration_digest", lambda folder: edit_config(folder, rms_norm_eps=1e-3)),
        ("configuration_digest", lambda folder: (folder / "chat_template.jinja").write_text("another")),
        ("configuration_digest", add_template_for_tools),
    ],
)
def test_other_weights_under_the_same_name_are_another_model(field: str, change: Change, checkpoint: Path) -> None:
    before = described(checkpoint)
    change(checkpoint)
    after = described(checkpoint)
    assert before.model_id == after.model_id
    assert before.identity.model_digest != after.identity.model_digest
    differing = {name for name, value in after.decides_output.items() if value != before.decides_output.get(name)}
    assert differing == {field}


def test_what_rounds_otherwise_is_another_model_and_kernels_count_where_bits_are_promised(checkpoint: Path) -> None:
    fast, strict = described(checkpoint), described(checkpoint, numerics="strict")
    assert "kernels" in strict.decides_output
    assert "kernels" not in fast.decides_output
    half = described(checkpoint, dtype="bfloat16")
    assert len({one.identity.model_digest for one in (fast, strict, half)}) == 3


@pytest.mark.parametrize("numerics", ["fast", "strict"])
def test_quantised_weights_make_another_model_in_any_numerics(numerics: str, checkpoint: Path) -> None:
    plain, quantized = (described(checkpoint, quantization=one, numerics=numerics) for one in ("none", "int8"))
    assert (plain.quantization, quantized.quantization) == ("", "int8")
    assert plain.identity.model_digest != quantized.identity.model_digest
    assert plain.parameter_count == quantized.parameter_count
    assert "int8 weights" in quantized.kernels
    for one, other in ((plain, quantized), (quantized, plain)):
        with pytest.raises(IncompatiblePair, match="quantization"):
            check_same_model(one, other)


def test_kernels_are_told_as_they_were_chosen(checkpoint: Path) -> None:
    said = described(checkpoint).kernels
    assert said.startswith(f"cpu {torch.backends.cpu.get_cpu_capability()}")
    assert f"torch {torch.__version__}" in said
    assert described(checkpoint, layout="dense").kernels != said
    with models_of_a_device():
        assert described(checkpoint).kernels.endswith("fixed shapes")


def test_a_model_made_from_a_configuration_is_known_by_its_parameters(checkpoint: Path) -> None:
    def made(**changes: float) -> ModelDescription:
        module = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=ATTENTION_NAME)
        with torch.no_grad():
            for name, value in changes.items():
                getattr(module, name).weight[0] += value
        return as_loaded(module, "made", None).description

    assert made().weights_digest == made().weights_digest != made(lm_head=1.0).weights_digest
    assert made().configuration_digest


def test_the_revision_is_the_commit_of_the_hubs_cache_and_else_unknown(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = Path(shutil.copytree(checkpoint, tmp_path / "models--a--b" / "snapshots" / COMMIT))
    assert origin_of_files(snapshot, "").revision == COMMIT
    assert origin_of_files(checkpoint, "").revision == ""
