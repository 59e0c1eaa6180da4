"""The identity of a model: digests of all that its outputs depend on, and the kernels that compute them.

It owns what counts as the same model. Weight files are hashed in `weights_digest`; it does not know what a coordinator
does about a difference.
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
"""Entries of a configuration that tell its origin, and the dtype, which the description has as loaded."""
_TOKENIZER_FILES = (
    "added_tokens.json",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
_PRODUCTS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "sve_bf16")
"""Processor features, by torch's names, that decide which kernels multiply in half precision."""


@dataclass(frozen=True)
class Origin:
    """Digests of what a model was made from."""

    weights_digest: str
    configuration_digest: str
    revision: str = ""
    """Commit of the hub's repository; empty when the folder does not tell it."""


def origin_of_files(folder: Path, weights_digest: str) -> Origin:
    """Return the origin of a checkpoint. Raise OSError or ValueError when the configuration cannot be read."""
    # The file is read as it is, because versions of the library fill in different defaults.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    texts = {name: _sha256(path.read_bytes()) for name in _TOKENIZER_FILES if (path := folder / name).is_file()}
    return Origin(weights_digest, _configuration_digest(config, texts), _revision(folder))


def origin_of_module(module: PreTrainedModel) -> Origin:
    """Return the origin of a model that was made from a configuration alone, by hashing its weights in memory."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with ThreadPoolExecutor() as threads:
        digests = dict(zip(tensors, threads.map(_tensor_digest, tensors.values()), strict=True))
    return Origin(_digest(digests), _configuration_digest(module.config.to_dict(), {}))


def kernels_of(model: LoadedModel, layout: str, *, fixed_shapes: bool) -> str:
    """Name all that was chosen at load and may change the last bits of a result, for people and for comparison."""
    quantization = model.description.quantization
    kinds = [
        _processor(model.kv_shape.device),
        f"torch {torch.__version__}",
        model.decoder.kernels,
        *([f"{quantization} weights"] if quantization else []),
        f"{layout} cache",
    ]
    return ", ".join([*kinds, "fixed shapes"] if fixed_shapes else kinds)


def model_digest(description: ModelDescription) -> str:
    """Return the SHA-256, in hexadecimal, over all that decides outputs."""
    deciding = description.decides_output
    if not description.quantization:
        del deciding["quantization"]  # older builds, which quantise nothing, digest the same
    return _digest(deciding)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Some of the supported versions of torch lack this function.
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    kinds = [torch.backends.cpu.get_cpu_capability(), *(name for name in _PRODUCTS if known.get(name))]
    return " ".join([device.type, *kinds, *(["oneDNN"] if has_onednn else [])])


def _configuration_digest(config: dict[str, Any], texts: dict[str, str]) -> str:
    deciding = {name: value for name, value in config.items() if name not in _NAMES_AND_VERSIONS}
    return _digest({"config": deciding, "tokenizer": texts})


def _revision(folder: Path) -> str:
    """Return the commit after which the hub's cache names the folder; empty for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else ""


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _digest([str(tensor.dtype), list(tensor.shape), _sha256(data.data)])


def _digest(value: Any) -> str:
    return _sha256(json.dumps(value, sort_keys=True, default=str).encode())


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
