"""The format of a model's weights and cache, and which one is fastest here, measured with the model's own products.

For drafts: what they propose cannot affect output, so their numbers may be rounded. It reads no model.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from paceline.engine.attention.paged import PagedAttention
from paceline.engine.backend import Backend, LayerKernels, Product
from paceline.engine.interfaces import KvShape, Span
from paceline.engine.model.forms import is_plain_decoder
from paceline.engine.model.linear import PACKED_BYTES, Linear
from paceline.engine.model.loader import kv_shape
from paceline.engine.model.plain_layer import products_of
from paceline.engine.plan import BatchPlan
from paceline.engine.quantization import QUANTIZATIONS, QuantizedWeight
from paceline.engine.threads import kernels_alone, pass_threads
from paceline.types import Quantization

SAMPLED_NUMBERS = 1 << 23
"""Most weights of the layers that are tried, most of the head, and most of the cache; the rest takes as long in
proportion."""
CACHED_TOKENS = 512
"""Tokens of each row that a pass reads from the cache."""
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

    There is no choice but on a CPU, and of a plain decoder. Beside int8 the dtype is the cache's.
    """
    if module.device.type != "cpu" or not is_plain_decoder(module):
        return [WeightFormat(dtype or module.dtype, quantization or "none")]
    dtypes = [dtype] if dtype else [*dict.fromkeys((module.dtype, *FORMAT_DTYPES))]
    beside = [one for one in dtypes if one in FORMAT_DTYPES] or dtypes
    possible = {"none": dtypes, "int8": beside, "w8a8": beside}
    wanted = [quantization] if quantization else QUANTIZATIONS
    return [WeightFormat(one, quantization) for quantization in wanted for one in possible[quantization]]


@torch.inference_mode()
def fastest_format(module: PreTrainedModel, formats: Sequence[WeightFormat], backend: Backend) -> WeightFormat:
    """Return the format in which products and attention of a plain decoder's pass take least."""
    if len(formats) == 1:
        return formats[0]
    layer_parameter_count = module.num_parameters() // len(cast(Any, module).model.layers)
    narrow = _narrow_weights(module)
    able = [one for one in formats if None not in _products(narrow, one, backend)]
    samples, shape = _samples(module), kv_shape(module, module.device)
    parts = {one: _parts(samples, shape, one, backend) for one in able}
    times = _pass_seconds(parts, backend, layer_parameter_count)
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


Part = Callable[[int], float]
"""Does a part of a pass of so many rows; returns the seconds that all like it take, infinity if int8 saves nothing."""


def _parts(samples: Sequence[_Sample], shape: KvShape, one: WeightFormat, backend: Backend) -> list[Part]:
    """Return the parts of a pass whose time depends on the format. `shape` is the cache's, of any dtype."""
    parts: list[Part] = [
        partial(_product_seconds, _products(sample.weights, one, backend), sample, one.dtype) for sample in samples
    ]
    if backend.kernels and backend.kernels.fits(shape.head_size):
        # The kernels read no others, and torch is no faster then.
        cached = one.dtype if one.dtype in FORMAT_DTYPES else torch.float32
        parts.append(_Reading(replace(shape, dtype=cached), backend.kernels))
    return parts


def _pass_seconds(
    parts: Mapping[WeightFormat, Sequence[Part]], backend: Backend, layer_parameter_count: int
) -> dict[WeightFormat, float]:
    """Return the time of a pass in each format, the geometric mean over the row counts."""
    least: dict[tuple[WeightFormat, int], list[float]] = {}
    # Formats take turns, so that a disturbance of the machine does not meet one alone.
    for _, one, row_count in product(range(TRIALS), parts, ROW_COUNTS):
        with kernels_alone() if backend.kernels else pass_threads(layer_parameter_count, row_count):
            seconds = [part(row_count) for part in parts[one]]
        least[one, row_count] = [*map(min, seconds, least.get((one, row_count), seconds))]
    sums = {one: [sum(least[one, row_count]) for row_count in ROW_COUNTS] for one in parts}
    return {one: math.prod(times) ** (1 / len(times)) for one, times in sums.items()}


class _Reading:
    """Attention to cached tokens, which takes a small model longer than its products."""

    def __init__(self, shape: KvShape, kernels: LayerKernels) -> None:
        """The kernels must fit the heads' size."""
        self._shape, self._kernels = shape, kernels
        slot_count = max(ROW_COUNTS) * CACHED_TOKENS
        layer_numbers = 2 * shape.kv_head_count * slot_count * shape.head_size
        self._layer_count = max(1, min(shape.layer_count, SAMPLED_NUMBERS // layer_numbers))
        size = 2 * self._layer_count, shape.kv_head_count, slot_count, shape.head_size
        self._memory = torch.zeros(size, dtype=shape.dtype)
        self._turns = torch.zeros((CACHED_TOKENS, shape.head_size))

    def __call__(self, row_count: int) -> float:
        shape, rows = self._shape, range(row_count)
        # Each row has a page.
        plan = BatchPlan(
            [Span("", row, row + 1, CACHED_TOKENS) for row in rows], [[row] for row in rows], CACHED_TOKENS
        )
        attention = PagedAttention(self._memory, shape.group_size, plan)
        projected = torch.zeros((row_count, (shape.head_count + 2 * shape.kv_head_count) * shape.head_size))
        read, turns = self._kernels.rows_of(attention), (self._turns, self._turns)
        began = time.perf_counter()
        for layer in range(self._layer_count):
            self._kernels.attend(read, projected, *attention.memory(layer), turns, None, 0.0, 1.0)
        return (time.perf_counter() - began) * shape.layer_count / self._layer_count


def _products(weights: Sequence[torch.Tensor], chosen: WeightFormat, backend: Backend) -> list[Product | None]:
    """Make products as a decoder would; None in place of one for which it would dequantise the weight."""
    converted = [weight.to(chosen.dtype) for weight in weights]
    if chosen.quantization != "none":
        rounds_rows = chosen.quantization == "w8a8"
        quantized = [QuantizedWeight.of(weight, rounds_rows=rounds_rows) for weight in converted]
        return [backend.pack_quantized(one, None) for one in quantized]
    return [backend.pack(weight, None) or Linear(weight, None, PACKED_BYTES) for weight in converted]


def _product_seconds(products: Sequence[Product | None], sample: _Sample, dtype: torch.dtype, row_count: int) -> float:
    rows = [torch.ones((row_count, weight.shape[1]), dtype=dtype) for weight in sample.weights]
    began = time.perf_counter()
    for multiply, values in zip(products, rows, strict=True):
        if multiply is None:
            return math.inf
        multiply(values)
    return (time.perf_counter() - began) / sample.share
