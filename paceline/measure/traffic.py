"""The bytes that decoding must read and the speed of memory, which give the least time of a round."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.engine.model.checkpoint import find_checkpoint
from paceline.types import ModelDescription, PassTraffic

COPY_BYTES = 256 << 20
"""Size of a copy; far more than any cache holds."""
COPIES = 5


def pass_traffic(model: str, served: ModelDescription) -> PassTraffic:
    """Count from the checkpoint's configuration, without reading weights. `served` tells the precision."""
    dtype: torch.dtype = getattr(torch, served.dtype)
    # Where int8 is not multiplied with, such weights were dequantised at load.
    is_int8 = "Decoder int8" in served.kernels
    weight_dtype = torch.int8 if is_int8 else dtype
    return config_traffic(find_checkpoint(model).config, dtype, weight_dtype)


def config_traffic(config: Any, dtype: torch.dtype, weight_dtype: torch.dtype) -> PassTraffic:
    """Count all weights except an untied embedding, of which a pass reads only a few rows. `dtype` is the cache's."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    read_count = sum(parameter.numel() for parameter in module.parameters())
    if not config.tie_word_embeddings:
        read_count -= module.get_input_embeddings().weight.numel()
    kv_head_count = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return PassTraffic(
        weight_bytes=read_count * weight_dtype.itemsize,
        token_bytes=2 * config.num_hidden_layers * kv_head_count * head_size * dtype.itemsize,
    )


def copy_bandwidth(device: str) -> float:
    """Return the bytes read and written a second by the fastest of some large copies, with torch's current threads."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fastest_s = float("inf")
    for _ in range(COPIES):
        _synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        fastest_s = min(fastest_s, time.perf_counter() - began)
    return 2 * COPY_BYTES / fastest_s


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
