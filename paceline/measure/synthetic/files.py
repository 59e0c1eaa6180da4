"""Writing of a synthetic model as a checkpoint, shard by shard, so that only one shard at a time is in memory."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.builtin import resolve_model
from paceline.engine.memory import free_bytes
from paceline.errors import InvalidRequest
from paceline.measure.synthetic.shapes import ModelShape
from paceline.measure.synthetic.weights import Recipe, make_config, make_tensor, tensor_sizes

SHARD_BYTES = 2 << 30
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
    """Divide the tensors among files of at most `SHARD_BYTES`; a larger tensor has a file of its own."""
    shards: list[list[str]] = []
    sizes: list[int] = []
    for name, size in tensor_sizes(shape).items():
        tensor_bytes = size.numel() * dtype.itemsize
        if not shards or sizes[-1] + tensor_bytes > SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += tensor_bytes
    return ModelFiles(dtype, tuple(map(tuple, shards)), tuple(sizes))


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
    places: dict[str, str] = {}
    for number, names in enumerate(files.shards, 1):
        file_name = f"model-{number:05}-of-{len(files.shards):05}.safetensors"
        tensors = {name: make_tensor(name, sizes[name], recipe) for name in names}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": files.total_bytes}, "weight_map": places}
    index_path = folder / "model.safetensors.index.json"
    index_path.write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file_name in set(places.values()):
        # safetensors makes its files readable for their owner alone; give them the mode of the others.
        (folder / file_name).chmod(index_path.stat().st_mode & 0o777)
    make_config(recipe.shape, dtype=recipe.dtype, synthetic=label).save_pretrained(folder)
    if with_tokenizer:
        for name in TOKENIZER_FILES:
            shutil.copy(resolve_model("builtin:target") / name, folder / name)
