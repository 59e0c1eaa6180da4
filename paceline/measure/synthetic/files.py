"""Writing of a synthetic model as a checkpoint."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.builtin import resolve_model
from paceline.engine.memory import free_bytes
from paceline.engine.model.weight_files import plan_shards, write_shards
from paceline.errors import InvalidRequest
from paceline.measure.synthetic.shapes import ModelShape
from paceline.measure.synthetic.weights import Recipe, make_config, make_tensor, tensor_sizes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model of a pair."""

    dtype: torch.dtype
    shards: tuple[tuple[str, ...], ...]
    """Names of the tensors in each file."""
    shard_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.shard_bytes)


def plan_files(shape: ModelShape, dtype: torch.dtype) -> ModelFiles:
    """Divide the tensors among files."""
    sizes = {name: size.numel() * dtype.itemsize for name, size in tensor_sizes(shape).items()}
    shards = plan_shards(sizes)
    return ModelFiles(dtype, tuple(map(tuple, shards)), tuple(sum(sizes[name] for name in names) for names in shards))


def check_room(output: Path, models: list[ModelFiles]) -> None:
    """Raise InvalidRequest, with the numbers, when disk or memory is too small."""
    wanted, free = sum(one.total_bytes for one in models), shutil.disk_usage(output).free
    if wanted > free:
        raise InvalidRequest(
            f"--output {output}: the pair takes {_gib(wanted)} and {_gib(free)} of disk are free", field="output"
        )
    # A shard, and the tensor under way in float32.
    check_memory("writing the weights", 2 * max(max(one.shard_bytes) for one in models))


def check_memory(purpose: str, wanted_bytes: int) -> None:
    free = free_bytes(torch.device("cpu"))
    if wanted_bytes > free:
        raise InvalidRequest(f"{purpose} takes {_gib(wanted_bytes)} of memory and {_gib(free)} are free", field="shape")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def write_model(
    folder: Path, files: ModelFiles, recipe: Recipe, label: dict[str, Any], *, with_tokenizer: bool
) -> None:
    """Write weights, configuration and, if asked to, the built-in pair's tokenizer."""
    folder.mkdir()
    sizes = tensor_sizes(recipe.shape)
    write_shards(folder, files.shards, lambda name: make_tensor(name, sizes[name], recipe))
    make_config(recipe.shape, dtype=recipe.dtype, synthetic=label).save_pretrained(folder)
    if with_tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(resolve_model("builtin:target") / name, folder / name)
