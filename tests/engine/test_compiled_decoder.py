"""A decoder by the compiled operations gives what the plain decoder gives by torch's, up to rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.engine.cache.paged import KvPool
from paceline.engine.interfaces import Span
from paceline.engine.loading import load_model
from paceline.engine.model.compiled_decoder import CompiledDecoder
from paceline.engine.model.model import LoadedModel
from paceline.engine.options import EngineOptions
from paceline.engine.placing import PackedRow
from paceline.engine.runner import Runner
from paceline.engine.threads import using_threads
from tests.checkpoints import write_model
from tests.tools import built_kernels


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "Qwen2"], name="model")
def model_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    built_kernels()
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return load_model(str(folder))


def logits(model: LoadedModel, rows: Sequence[Sequence[PackedRow]]) -> Iterator[torch.Tensor]:
    """Yield the logits of consecutive calls."""
    runner = Runner(model, EngineOptions(kv_memory="1MiB", page_tokens=4))
    for call in rows:
        for outcome in runner.forward(call):
            assert isinstance(outcome, torch.Tensor)
            yield outcome


def test_a_model_gives_the_logits_of_torchs_operations(model: LoadedModel) -> None:
    decoder = model.decoder
    assert isinstance(decoder, CompiledDecoder)
    plain = replace(model, decoder=decoder.plain)
    first, second = tuple(range(20, 60)), (*range(20, 45), *range(90, 99))
    calls = [
        [PackedRow("a", 0, first), PackedRow("b", 0, second[:7])],
        # A row in two segments: shared pages of the first, then its own.
        [PackedRow("c", 0, (*first[:30], 7, 8, 9), draft_count=2), PackedRow("a", 40, (3, 4, 5, 6, 7, 8), 5)],
        [PackedRow("b", 7, second[7:]), PackedRow("a", 43, (9,)), PackedRow("c", 33, (1, 2), 1)],
    ]
    for one, other in zip(logits(model, calls), logits(plain, calls), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_passes_on_several_threads_give_the_same(model: LoadedModel) -> None:
    pool = KvPool(model.kv_shape, 2**20, page_tokens=4)
    pool.keep("a", 0, ())
    pool.append("a", range(50, 70))
    token_ids, positions = torch.arange(50, 70)[None], torch.arange(20)[None]
    wanted, attention = torch.arange(20), pool.attention([Span("a", 0, 20, 20)])
    found = []
    for thread_count in (1, 2, 3):
        with using_threads(thread_count):
            found.append(model.decoder.logits(token_ids, positions, wanted, attention))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_sequence_longer_than_the_models_positions_is_refused(model: LoadedModel) -> None:
    length = model.description.max_length + 1
    pool = KvPool(model.kv_shape, 2 * length * model.kv_shape.token_bytes, page_tokens=4)
    pool.keep("a", 0, ())
    pool.append("a", (5,) * length)
    token_ids, attention = torch.full((1, length), 5), pool.attention([Span("a", 0, length, length)])
    with using_threads(1), pytest.raises(IndexError, match="positions"):
        model.decoder.logits(token_ids, torch.arange(length)[None], torch.tensor([0]), attention)
