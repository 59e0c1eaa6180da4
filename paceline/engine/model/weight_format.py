"""The format of a model's weights, and which one is fastest here, measured with the model's own products.

For drafts: what they propose cannot affect output, so their weights may be rounded. It reads no model.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from paceline.engine.backend import Backend, Product
from paceline.engine.model.linear import PACKED_BYTES, Linear
from paceline.engine.model.plain_layer import products_of
from paceline.engine.model.quantized_layers import can_quantize
from paceline.engine.quantization import QUANTIZATIONS, Quantization, QuantizedWeight
from paceline.engine.threads import kernels_alone, pass_threads

SAMPLED_NUMBERS = 1 << 23
"""Most weights of the layers that are tried, and most of the head; the rest takes as long in proportion."""
ROW_COUNTS = (1, 8)
"""Rows of a pass that drafts one token for one sequence, and for a group of eight."""
TRIALS = 5
NARROW_COLUMNS = 16
FORMAT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that products of our own have."""


@dataclass(frozen=True)
class WeightFormat:
    dtype: torch.dtype
    """Dtype of the cache, and of weights that are not quantised."""
    quantization: Quantization = "none"


def possible_formats(
    module: PreTrainedModel, dtype: torch.dtype | None, quantization: Quantization | None
) -> list[WeightFormat]:
    """Return the formats among which the fastest is looked for, the module's own first; None leaves a choice open.

    There is no choice but on a CPU, and of a plain decoder. Beside int8 the dtype hardly matters, so it stays.
    """
    if module.device.type != "cpu" or not can_quantize(module):
        return [WeightFormat(dtype or module.dtype, quantization or "none")]
    dtypes = [dtype] if dtype else [*dict.fromkeys((module.dtype, *FORMAT_DTYPES))]
    beside = [one for one in dtypes if one in FORMAT_DTYPES] or dtypes
    possible = {"none": dtypes, "int8": beside[:1], "w8a8": beside[:1]}
    wanted = [quantization] if quantization else QUANTIZATIONS
    return [WeightFormat(one, quantization) for quantization in wanted for one in possible[quantization]]


@torch.inference_mode()
def fastest_format(module: PreTrainedModel, formats: Sequence[WeightFormat], backend: Backend) -> WeightFormat:
    """Return the format in which the products of a plain decoder's pass take least."""
    if len(formats) == 1:
        return formats[0]
    layer_parameter_count = module.num_parameters() // len(cast(Any, module).model.layers)
    narrow = _narrow_weights(module)
    able = [one for one in formats if None not in _products(narrow, one, backend)]
    times = _pass_seconds(_samples(module), able, backend, layer_parameter_count)
    return min(able, key=times.__getitem__)


def _narrow_weights(module: Any) -> list[torch.Tensor]:
    """Return a few columns of products for rows of every size: by some sizes a format cannot multiply at all."""
    weights = [one.weight.detach() for layer in module.model.layers for group in products_of(layer) for one in group]
    return [*{one.shape[1]: one[:NARROW_COLUMNS] for one in weights}.values()]


@dataclass(frozen=True)
class _Sample:
    weights: Sequence[torch.Tensor]
    """Each [N, K]."""
    share: float
    """How much they are of all weights like them."""


def _samples(module: Any) -> tuple[_Sample, _Sample]:
    """Return products of the layers, and the head's."""
    groups = [[one.weight.detach() for one in group] for layer in module.model.layers for group in products_of(layer)]
    sampled: list[torch.Tensor] = []
    while len(sampled) < len(groups) and sum(one.numel() for one in sampled) < SAMPLED_NUMBERS:
        sampled.append(torch.cat(groups[len(sampled)]))
    total = sum(one.numel() for group in groups for one in group)
    head = module.get_output_embeddings().weight.detach()
    part = head[: max(1, SAMPLED_NUMBERS // head.shape[1])]
    return _Sample(sampled, sum(one.numel() for one in sampled) / total), _Sample([part], len(part) / len(head))


def _pass_seconds(
    samples: Sequence[_Sample], formats: Sequence[WeightFormat], backend: Backend, layer_parameter_count: int
) -> dict[WeightFormat, float]:
    """Return the time of a pass's products, the geometric mean over the row counts; infinity if int8 saves nothing."""
    made = {one: [_products(sample.weights, one, backend) for sample in samples] for one in formats}
    least: dict[tuple[WeightFormat, int, int], float] = {}
    # Formats take turns, so that a disturbance of the machine does not meet one alone.
    for _, (one, products), row_count in product(range(TRIALS), made.items(), ROW_COUNTS):
        for number, (sample, part) in enumerate(zip(samples, products, strict=True)):
            rows = [torch.ones((row_count, weight.shape[1]), dtype=one.dtype) for weight in sample.weights]
            with kernels_alone() if backend.kernels else pass_threads(layer_parameter_count, row_count):
                seconds = _seconds(part, rows) / sample.share
            least[one, row_count, number] = min(seconds, least.get((one, row_count, number), math.inf))
    sums = {
        one: [sum(least[one, row_count, number] for number in range(len(samples))) for row_count in ROW_COUNTS]
        for one in formats
    }
    return {one: math.prod(times) ** (1 / len(times)) for one, times in sums.items()}


def _products(weights: Sequence[torch.Tensor], chosen: WeightFormat, backend: Backend) -> list[Product | None]:
    """Make products as a decoder would; None in place of one for which it would dequantise the weight."""
    converted = [weight.to(chosen.dtype) for weight in weights]
    if chosen.quantization != "none":
        rounds_rows = chosen.quantization == "w8a8"
        quantized = [QuantizedWeight.of(weight, rounds_rows=rounds_rows) for weight in converted]
        return [backend.pack_quantized(one, None) for one in quantized]
    return [backend.pack(weight, None) or Linear(weight, None, PACKED_BYTES) for weight in converted]


def _seconds(products: Sequence[Product | None], rows: Sequence[torch.Tensor]) -> float:
    began = time.perf_counter()
    for multiply, values in zip(products, rows, strict=True):
        if multiply is None:
            return math.inf
        multiply(values)
    return time.perf_counter() - began
