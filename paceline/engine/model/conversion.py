"""Conversion of a checkpoint into the form that is loaded: weights in safetensors, the tokenizer as tokenizer.json.

It owns the reading of pickled weights, of which only tensors are taken: nothing in them is run. Nothing else of the
project reads them.
"""

import re
import shutil
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.engine.memory import is_out_of_memory, refusing_to_start
from paceline.engine.model.checkpoint import PICKLED_WEIGHTS, READ_FILES, Checkpoint, open_checkpoint, read_tokenizer
from paceline.engine.model.weight_files import plan_shards, write_shards
from paceline.errors import InvalidRequest, ModelNotUsable
from paceline.files import is_there, replacing

_KEPT = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.md", "LICENSE*", "tokenizer.model")
"""Patterns of the files that are copied as they are. Code is not among them."""
_WANTED = re.compile(r"GLOBAL (\S+)")
"""Where torch's error names what a pickle asks for beside tensors."""


@dataclass(frozen=True)
class Converted:
    """What was written."""

    tensor_count: int
    """Tensors that were pickled; 0 when the weights were in safetensors before."""
    total_bytes: int
    dtypes: tuple[str, ...]
    compared_texts: int
    """Texts on which the new tokenizer.json was compared with its original; 0 when there was one before."""
    has_chat_template: bool


def convert(model: str, output: Path) -> Converted:
    """Write a directory or hub id to a new folder in a form that can be loaded; the weights keep their dtype.

    Raise InvalidRequest or ModelNotUsable, and leave no folder then.
    """
    try:
        if is_there(output):
            raise InvalidRequest(f"--output {output} is there already; name a new folder", field="output")
    except OSError as error:
        raise InvalidRequest(f"--output {output} cannot be written: {error}", field="output") from error
    with refusing_to_start(f"converting {model!r} takes more memory than there is: a new file of 2 GiB at a time"):
        return _convert(_open(model), output)


def _convert(checkpoint: Checkpoint, output: Path) -> Converted:
    tensors = {} if checkpoint.has_safetensors else _read_pickled(checkpoint)
    with replacing(output) as beside:
        beside.mkdir(parents=True)
        _copy(_kept_files(checkpoint.folder), checkpoint.folder, beside)
        compared = _convert_tokenizer(checkpoint, beside) if checkpoint.has_only_sentencepiece else 0
        if checkpoint.has_safetensors:
            _copy(checkpoint.folder.glob("*.safetensors*"), checkpoint.folder, beside)
        else:
            _write_tensors(tensors, beside)
        tokenizer = read_tokenizer(replace(checkpoint, folder=beside))
    return Converted(
        tensor_count=len(tensors),
        total_bytes=sum(one.nbytes for one in tensors.values()),
        dtypes=tuple(sorted({str(one.dtype).removeprefix("torch.") for one in tensors.values()})),
        compared_texts=compared,
        has_chat_template=bool(tokenizer and tokenizer.chat_template),
    )


def _open(model: str) -> Checkpoint:
    checkpoint = open_checkpoint(model)
    if checkpoint.has_safetensors:
        if not checkpoint.has_only_sentencepiece:
            raise InvalidRequest(f"model {model!r} needs no conversion; give it to --model as it is", field="model")
        return checkpoint
    checkpoint = open_checkpoint(model, (*READ_FILES, PICKLED_WEIGHTS))
    if not any(checkpoint.folder.glob(PICKLED_WEIGHTS)):
        raise ModelNotUsable(f"model {model!r} has neither safetensors nor pytorch_model.bin; nothing can be converted")
    return checkpoint


def _read_pickled(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return all tensors. They are read from the files only when they are used, except in files of before torch 1.6."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.pickled_files:
        loaded = _load(checkpoint.model, file)
        if not isinstance(loaded, dict) or not loaded or not all(isinstance(one, Tensor) for one in loaded.values()):
            raise ModelNotUsable(f"model {checkpoint.model!r}: {file.name} holds something other than named tensors")
        if other := [name for name, tensor in loaded.items() if not _is_plain(tensor)]:
            raise ModelNotUsable(
                f"model {checkpoint.model!r}: {other[0]} in {file.name} is quantised, sparse or without numbers, and "
                "safetensors holds none such; convert the checkpoint that it was made from"
            )
        tensors |= {str(name): tensor.detach() for name, tensor in loaded.items()}
    return tensors


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is all its numbers, one after another."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_quantized or tensor.is_complex() or tensor.is_meta)


def _load(model: str, file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # damage raises many kinds
        if is_out_of_memory(error):
            raise
        if wanted := _WANTED.search(str(error)):
            raise ModelNotUsable(
                f"model {model!r}: {file.name} is refused, because it asks for {wanted[1]}, which makes no tensor; "
                "nothing of it was run; use weights in safetensors, from someone you trust"
            ) from error
        raise ModelNotUsable(
            f"model {model!r}: {file.name} cannot be read, perhaps half written: {str(error).strip() or 'it is empty'}"
        ) from error


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    shards = plan_shards({name: tensor.nbytes for name, tensor in tensors.items()})
    # Copies, because safetensors takes no tensors that share memory, as tied ones do.
    write_shards(folder, shards, lambda name: tensors[name].clone(memory_format=torch.contiguous_format))


def _convert_tokenizer(checkpoint: Checkpoint, folder: Path) -> int:
    # Imported only here: most checkpoints need no sentencepiece.
    from paceline.engine.model.sentencepiece_form import convert_tokenizer

    return convert_tokenizer(checkpoint, folder)


def _kept_files(folder: Path) -> Sequence[Path]:
    found = {file for pattern in _KEPT for file in folder.glob(pattern)}
    return [file for file in found if not file.name.startswith(".") and not file.name.endswith(".index.json")]


def _copy(files: Iterable[Path], origin: Path, folder: Path) -> None:
    """Copy files of the folder `origin`, or of a folder in it, to the same places in `folder`."""
    for file in files:
        copied = folder / file.relative_to(origin)
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copied)  # without its mode: one that is read-only could not be changed here
