"""The sizes of a model, from its config.json alone or with the headers of its weight files.

It reads no weights. It does not know what the sizes mean for memory or speed.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.builtin import resolve_model
from paceline.errors import ModelNotUsable

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by dtype."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations whose feed-forwards are shared out among experts."""
_LONGROPE = ("longrope", "su")
"""Names of one kind of positions, the second in older files."""
_WEIGHTS, _WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers reads, the first where both are there."""
_HEADER_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelDimensions:
    layer_count: int
    hidden_size: int
    intermediate_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    vocabulary_size: int
    max_length: int
    """Positions that have a rotation: tokens of the longest sequence that is served."""
    dtype: str
    """What config.json says, float32 if it says nothing."""
    is_tied: bool
    """Whether the output head is the embedding."""
    stored_parameter_count: int | None = None
    """Numbers in the weight files; None where there are none."""
    mixes_experts: bool = False
    """Whether a layer's feed-forward is shared out among experts, which the sizes do not tell."""

    @property
    def projection_size(self) -> int:
        """Queries, keys and values of a token."""
        return (self.head_count + 2 * self.kv_head_count) * self.head_size

    @property
    def attended_size(self) -> int:
        return self.head_count * self.head_size

    @property
    def embedding_count(self) -> int:
        """Numbers of the embedding, and of the output head."""
        return self.vocabulary_size * self.hidden_size

    @property
    def layer_product_count(self) -> int:
        """Numbers of the weights that a layer multiplies by, of a gated feed-forward."""
        return (self.projection_size + self.attended_size + 3 * self.intermediate_size) * self.hidden_size

    @property
    def parameter_count(self) -> int:
        """Numbers of all weights: those of the files, or those that follow from the sizes, without biases."""
        if self.stored_parameter_count is not None:
            return self.stored_parameter_count
        norms = (2 * self.layer_count + 1) * self.hidden_size
        embeddings = self.embedding_count * (1 if self.is_tied else 2)
        return self.layer_count * self.layer_product_count + embeddings + norms


def read_dimensions(model: str) -> ModelDimensions:
    """Read a checkpoint's folder, `builtin:NAME`, or the path of a config.json alone. Raise ModelNotUsable."""
    place = resolve_model(model)
    config = place / "config.json" if place.is_dir() else place
    if not config.is_file():
        raise ModelNotUsable(
            f"model {model!r} is neither a folder with a config.json nor such a file; give one of the two, or "
            "builtin:target. Of a model on the hub, its config.json is enough"
        )
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        dimensions = dimensions_of(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelNotUsable(f"model {model!r}: {config} does not have the sizes of a decoder: {error!r}") from error
    stored = _counts_of(_weight_files(config.parent)) if place.is_dir() else {}
    if not stored and dimensions.mixes_experts:
        raise ModelNotUsable(
            f"model {model!r} has experts, whose weights do not follow from {config}; give the folder with its weights"
        )
    return replace(dimensions, stored_parameter_count=sum(stored.values()) if stored else None)


def dimensions_of(values: Mapping[str, Any]) -> ModelDimensions:
    """Return the sizes that a configuration states by transformers' names. Raise KeyError for one that lacks."""
    head_count = int(values["num_attention_heads"])
    if head_count < 1:
        raise ValueError(f"num_attention_heads is {head_count}")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    found = ModelDimensions(
        layer_count=int(values["num_hidden_layers"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        head_count=head_count,
        kv_head_count=int(values.get("num_key_value_heads") or head_count),
        head_size=int(values.get("head_dim") or values["hidden_size"] // head_count),
        vocabulary_size=int(values["vocab_size"]),
        max_length=longest_served(
            int(values["max_position_embeddings"]),
            values.get("rope_parameters") or values.get("rope_scaling") or {},
            values.get("original_max_position_embeddings"),
        ),
        dtype=dtype if dtype in VALUE_BYTES else "float32",
        is_tied=bool(values.get("tie_word_embeddings", False)),
        mixes_experts=any(int(values.get(name) or 0) > 1 for name in _EXPERTS),
    )
    if wrong := {name: size for name, size in vars(found).items() if type(size) is int and size < 1}:
        raise ValueError(f"sizes below 1: {wrong}")
    return found


def longest_served(position_count: int, rope: Mapping[str, Any], original: int | None = None) -> int:
    """Return the length of the longest sequence that is served, by a configuration's rotary positions `rope`.

    With `longrope` it is the original length: one token beyond it changes the frequencies of all tokens of a call,
    those of other sequences too. `original` is where Phi-3's configuration has it, beside the rest.
    """
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, Mapping)]
    found = [one for one in kinds if (one.get("rope_type") or one.get("type")) in _LONGROPE]
    lengths = [original or one.get("original_max_position_embeddings", position_count) for one in found]
    return min([position_count, *map(int, lengths)])


def stored_counts(folder: Path) -> dict[str, int]:
    """Return the numbers of each tensor in all of a folder's weight files. Raise ModelNotUsable."""
    return _counts_of(sorted(folder.glob("*.safetensors")))


def _counts_of(files: Iterable[Path]) -> dict[str, int]:
    """Return the numbers of each tensor in weight files, from their headers. Raise ModelNotUsable."""
    return {name: count for file in files for name, count in _counts(file)}


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a model that are loaded; a folder may have its weights once more, in their maker's form."""
    found = sorted(folder.glob("*.safetensors"))
    if not found or _WEIGHTS in (one.name for one in found):
        return [one for one in found if one.name == _WEIGHTS]
    index = folder / _WEIGHTS_INDEX
    if not index.exists():
        return found
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(places.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotUsable(f"{index} does not name the files of the weights; it may be half written") from error


def _counts(file: Path) -> Iterator[tuple[str, int]]:
    """Yield the tensors of a file in safetensors' form: a length, a JSON object, and the data."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(_HEADER_LENGTH_BYTES), "little")
            if size > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(content.read(size))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, math.prod(tensor["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotUsable(f"{file} is no file of safetensors, or half written: {error!r}") from error
