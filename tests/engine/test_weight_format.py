"""A draft's weights take the format that is fastest here; what is asked for by name is obeyed."""

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from transformers import PreTrainedModel

from draft_service import __main__ as draft_service
from draft_service.config import DraftSettings
from paceline.engine import loading
from paceline.engine.backend import Backend, find_backend
from paceline.engine.loading import Auto, load_fastest, load_model
from paceline.engine.model import weight_format
from paceline.engine.model.checkpoint import find_checkpoint
from paceline.engine.model.loader import kv_shape, read_module
from paceline.engine.model.weight_format import WeightFormat, _samples, possible_formats
from paceline.engine.native import PassRows
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.model_service import serving
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.process.settings import parse_settings
from paceline.types import Dtype, Quantization
from target_service import __main__ as target_service
from target_service.config import TargetSettings
from tests.checkpoints import write_model
from tests.conftest import PairOfCheckpoints
from tests.tools import NEEDS_ROUNDED_ROWS, built_kernels, rounds_rows_here

OPTIONS = EngineOptions("1MiB")
FULL, HALF = WeightFormat(torch.float32), WeightFormat(torch.bfloat16)
FULL_INT8, HALF_INT8 = (WeightFormat(dtype, "int8") for dtype in (torch.float32, torch.bfloat16))
FULL_W8A8, HALF_W8A8 = (WeightFormat(dtype, "w8a8") for dtype in (torch.float32, torch.bfloat16))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[WeightFormat, float]:
    """Seconds that each format is to take; a test may change them."""
    chosen = {FULL: 4.0, HALF: 3.0, FULL_INT8: 2.0, HALF_INT8: 1.0, FULL_W8A8: 1.9, HALF_W8A8: 1.1}
    monkeypatch.setattr(weight_format, "_pass_seconds", lambda *_: chosen)
    return chosen


def test_the_fastest_format_is_taken_whatever_its_name(
    times: dict[WeightFormat, float], pairs: dict[str, PairOfCheckpoints]
) -> None:
    for fastest in (FULL, HALF, FULL_INT8, HALF_INT8, *([FULL_W8A8, HALF_W8A8] if rounds_rows_here() else [])):
        times[fastest] = 0.5 * min(times.values())
        found = load_fastest(str(pairs["Llama"].draft)).description
        assert (getattr(torch, found.dtype), found.quantization or "none") == (fastest.dtype, fastest.quantization)


@pytest.mark.parametrize(
    ("dtype", "quantization", "formats"),
    [
        ("auto", "auto", {FULL, HALF, FULL_INT8, HALF_INT8, FULL_W8A8, HALF_W8A8}),
        ("auto", "none", {FULL, HALF}),
        ("auto", "int8", {FULL_INT8, HALF_INT8}),
        ("bfloat16", "auto", {HALF, HALF_INT8, HALF_W8A8}),
        ("float32", "none", {FULL}),
        ("bfloat16", "int8", {HALF_INT8}),
        ("float32", "int8", {FULL_INT8}),
        pytest.param("auto", "w8a8", {FULL_W8A8, HALF_W8A8}, marks=NEEDS_ROUNDED_ROWS),
    ],
)
def test_an_explicit_dtype_or_quantization_is_obeyed(
    dtype: Dtype,
    quantization: Quantization | Auto,
    formats: set[WeightFormat],
    times: dict[WeightFormat, float],
    pairs: dict[str, PairOfCheckpoints],
) -> None:
    fastest = min(formats, key=times.__getitem__)
    found = load_fastest(str(pairs["Llama"].draft), dtype, quantization=quantization).description
    assert (getattr(torch, found.dtype), found.quantization or "none") == (fastest.dtype, fastest.quantization)


def test_a_converted_draft_is_what_would_have_been_read_so_and_is_read_once(
    times: dict[WeightFormat, float], pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    times[HALF] = 0.1
    read = Mock(side_effect=read_module)
    monkeypatch.setattr(loading, "read_module", read)
    converted = Runner(load_fastest(str(pairs["Qwen3"].draft)), OPTIONS)
    assert read.call_count == 1
    read_so = Runner(load_model(str(pairs["Qwen3"].draft), "bfloat16"), OPTIONS)
    assert converted.describe().lasting == read_so.describe().lasting
    (one,), (other,) = (runner.forward([PackedRow("a", 0, tuple(range(20, 60)))]) for runner in (converted, read_so))
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert torch.equal(one, other)


def test_formats_are_tried_with_the_drafts_own_products(pairs: dict[str, PairOfCheckpoints]) -> None:
    built_kernels()
    module, _ = read_module(find_checkpoint(str(pairs["Llama"].draft)), "auto", "cpu")
    formats = possible_formats(module, None, None)
    assert formats[0] == FULL
    found = seconds_of(module, formats, find_backend(module.device))
    lacking = set() if rounds_rows_here() else {FULL_W8A8, HALF_W8A8}
    assert {one for one, seconds in found.items() if not 0 < seconds < 1} == lacking
    without = seconds_of(module, formats, Backend())
    assert {one for one, seconds in without.items() if seconds == math.inf} == set(formats) - {FULL, HALF}


def seconds_of(
    module: PreTrainedModel, formats: Sequence[WeightFormat], backend: Backend
) -> Mapping[WeightFormat, float]:
    parts = {one: parts_of(module, one, backend) for one in formats}
    return weight_format._pass_seconds(parts, backend, 1000)


def parts_of(module: PreTrainedModel, one: WeightFormat, backend: Backend) -> Sequence[weight_format.Part]:
    return weight_format._parts(_samples(module), kv_shape(module, module.device), one, backend)


def test_reading_the_cache_is_tried_in_its_dtype_for_every_row(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a small draft longer than its products, which alone were tried."""
    module, _ = read_module(find_checkpoint(str(pairs["Llama"].draft)), "auto", "cpu")
    kernels, calls = built_kernels(), []
    attend = kernels.attend

    def noted(rows: PassRows, projected: torch.Tensor, keys: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append((rows.longest, len(projected), keys.dtype))
        return attend(rows, projected, keys, *others)

    monkeypatch.setattr(kernels, "attend", noted)
    *products, reading = parts_of(module, HALF_INT8, find_backend(module.device))
    assert reading(8) > 0
    assert calls == module.config.num_hidden_layers * [(weight_format.CACHED_TOKENS, 8, torch.bfloat16)]
    assert len(products) == len(_samples(module))
    monkeypatch.setattr(weight_format, "SAMPLED_NUMBERS", 1)
    calls.clear()
    *_, reading = parts_of(module, FULL, find_backend(module.device))
    assert reading(1) > 0
    assert calls == [(weight_format.CACHED_TOKENS, 1, torch.float32)]


def test_a_draft_in_float16_is_tried_too(tmp_path: Path) -> None:
    built_kernels()
    module, _ = read_module(find_checkpoint(str(write_model(tmp_path, "Llama"))), "auto", "cpu")
    halved = module.to(torch.float16)  # type: ignore[arg-type]
    formats = possible_formats(halved, None, "none")
    found = seconds_of(halved, formats, find_backend(module.device))
    assert [one.dtype for one in found] == [torch.float16, torch.float32, torch.bfloat16]
    assert all(0 < seconds < 1 for seconds in found.values())


def test_of_a_large_draft_few_products_are_tried(
    pairs: dict[str, PairOfCheckpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = read_module(find_checkpoint(str(pairs["Llama"].draft)), "auto", "cpu")
    whole = _samples(module)
    assert [one.share for one in whole] == [1, 1]
    monkeypatch.setattr(weight_format, "SAMPLED_NUMBERS", 64 * 32)
    layers, head = _samples(module)
    assert len(layers.weights) == 1
    assert 0 < layers.share < 0.25
    assert (head.weights[0].shape[0], head.share) == (32, 32 / 320)


@NEEDS_ROUNDED_ROWS
def test_a_format_that_cannot_multiply_rows_of_some_size_is_not_chosen(
    times: dict[WeightFormat, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The product of such rows may not be among those that are tried, and the start was refused."""
    times[FULL_W8A8] = 0.1
    odd = write_model(tmp_path, "Llama", intermediate_size=72)
    found = load_fastest(str(odd)).description
    assert found.quantization == "int8"


def test_what_is_no_plain_decoder_keeps_the_checkpoints_format(
    times: dict[WeightFormat, float], tmp_path: Path
) -> None:
    times.clear()
    experts = write_model(tmp_path, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    found = load_fastest(str(experts)).description
    assert (found.dtype, found.quantization) == ("float32", "")
    assert load_fastest(str(experts), "bfloat16").description.dtype == "bfloat16"


def test_dtype_and_quantization_of_a_cluster_are_the_targets_alone() -> None:
    plan = plan_cluster(ClusterOptions(dtype="bfloat16", quantization="int8"))
    assert plan.draft
    assert (plan.target.settings.dtype, plan.target.settings.quantization) == ("bfloat16", "int8")
    assert (plan.draft.settings.dtype, plan.draft.settings.quantization) == ("auto", "auto")
    assert plan_cluster(ClusterOptions()).target.settings.quantization == "none"


def test_beside_int8_the_dtypes_that_have_products_are_tried_the_drafts_own_first(tmp_path: Path) -> None:
    expected = {torch.bfloat16: [HALF_INT8, FULL_INT8], torch.float16: [FULL_INT8, HALF_INT8]}
    for dtype, quantized in expected.items():
        module, _ = read_module(find_checkpoint(str(write_model(tmp_path, "Llama"))), "auto", "cpu")
        found = possible_formats(module.to(dtype), None, None)  # type: ignore[arg-type]
        assert found[0] == WeightFormat(dtype)
        assert [one for one in found if one.quantization == "int8"] == quantized
        assert {FULL, HALF} <= set(found)


async def test_the_draft_service_takes_the_fastest_and_the_target_service_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_model = AsyncMock()
    default = signature(serving.serve_model).parameters["load"].default
    monkeypatch.setattr(serving, "serve_model", serve_model)
    await draft_service.serve(parse_settings(DraftSettings, "draft_service", []))
    await target_service.serve(parse_settings(TargetSettings, "target_service", []))
    draft, target = serve_model.await_args_list
    assert draft.args[-1] is load_fastest
    assert load_fastest not in target.args
    assert default is load_model
