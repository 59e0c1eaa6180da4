"""Writing of a checkpoint's weights: shard by shard, so that only one shard at a time is in memory.

It owns the names of the files and their index. It does not know where the tensors come from.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

SHARD_BYTES = 2 << 30


def plan_shards(tensor_bytes: Mapping[str, int]) -> list[list[str]]:
    """Divide tensors, given by name and size, among files of at most `SHARD_BYTES`; a larger one has its own file."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in tensor_bytes.items():
        if not shards or filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shards(folder: Path, shards: Sequence[Sequence[str]], make: Callable[[str], Tensor]) -> None:
    """Write the planned files and their index. `make` returns a tensor that shares its memory with no other."""
    places: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total_bytes += _write_shard(folder / file_name, names, make)
        places |= dict.fromkeys(names, file_name)
    index_path = folder / SAFE_WEIGHTS_INDEX_NAME
    index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    index_path.write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file_name in set(places.values()):
        # safetensors makes its files readable for their owner alone; give them the mode of the others.
        (folder / file_name).chmod(index_path.stat().st_mode & 0o777)


def _write_shard(file: Path, names: Sequence[str], make: Callable[[str], Tensor]) -> int:
    """Return the bytes of the tensors, which are freed before the next shard's are made."""
    tensors = {name: make(name) for name in names}
    save_file(tensors, file, metadata={"format": "pt"})
    return sum(one.nbytes for one in tensors.values())
