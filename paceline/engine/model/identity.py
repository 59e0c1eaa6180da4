"""Which model this is: digests of what its outputs depend on, and the kernels that compute them.

Owns what counts as the same model. Files are hashed in `weights_digest`; what a coordinator does about a difference is
not known here.
"""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.engine.model.model import LoadedModel
from paceline.types import ModelDescription

_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAMES_AND_VERSIONS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Entries of a configuration that say where it comes from, or what the description says as loaded."""
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
_PRODUCTS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "sve_bf16")
"""Instructions by which products of half precision are chosen, as torch names them."""


@dataclass(frozen=True)
class Origin:
    """What a model was made from."""

    weights_digest: str
    configuration_digest: str
    revision: str = ""
    """Commit of the hub's repository; empty where the folder does not tell it."""


def origin_of_files(folder: Path, weights_digest: str) -> Origin:
    """Raises OSError or ValueError where the configuration cannot be read."""
    # As the files have it: a library of another version may fill in, or write, more.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    texts = {name: _sha256(path.read_bytes()) for name in _TOKENIZER_FILES if (path := folder / name).is_file()}
    return Origin(weights_digest, _configuration_digest(config, texts), _revision(folder))


def origin_of_module(module: PreTrainedModel) -> Origin:
    """For a model that was made from a configuration alone: of its weights as they are."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with ThreadPoolExecutor() as threads:
        digests = dict(zip(tensors, threads.map(_tensor_digest, tensors.values()), strict=True))
    return Origin(_digest(digests), _configuration_digest(module.config.to_dict(), {}))


def kernels_of(model: LoadedModel, layout: str, *, fixed_shapes: bool) -> str:
    """Name, for people and to be compared, what was chosen at load and may change the last bits of a result."""
    kinds = [
        _processor(model.kv_shape.device),
        f"torch {torch.__version__}",
        type(model.decoder).__name__,
        f"{layout} cache",
    ]
    return ", ".join([*kinds, "fixed shapes"] if fixed_shapes else kinds)


def model_digest(description: ModelDescription) -> str:
    """SHA-256, in hexadecimal, over all that decides outputs."""
    return _digest(description.decides_output)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Not in every torch that is allowed.
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    kinds = [torch.backends.cpu.get_cpu_capability(), *(name for name in _PRODUCTS if known.get(name))]
    return " ".join([device.type, *kinds, *(["oneDNN"] if has_onednn else [])])


def _configuration_digest(config: dict[str, Any], texts: dict[str, str]) -> str:
    deciding = {name: value for name, value in config.items() if name not in _NAMES_AND_VERSIONS}
    return _digest({"config": deciding, "tokenizer": texts})


def _revision(folder: Path) -> str:
    """The hub's cache has a folder of its own for each commit."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else ""


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _digest([str(tensor.dtype), list(tensor.shape), _sha256(data.data)])


def _digest(value: Any) -> str:
    return _sha256(json.dumps(value, sort_keys=True, default=str).encode())


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
