"""A draft's training outputs: those kept when making them ends early, of a made up product, and many at once."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import repeat
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from transformers import LlamaForCausalLM, StaticCache

from paceline.builtin import resolve_model
from paceline.errors import PeerFailed, StartupError
from paceline.process.cluster_plan import ClusterOptions
from paceline.tasks import side_by_side
from training import outputs
from training.outputs import Output, Prompt, greedy_outputs


class Product:
    """Answers `answered_count` requests; the next one fails, or hangs while the supervisor gives a service up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answered_count: int, *, request_fails: bool) -> None:
        self.words: list[str] = []
        self._left = answered_count
        self._request_fails = request_fails
        self._given_up = asyncio.Event()
        monkeypatch.setattr(outputs, "running_cluster", self._running)
        monkeypatch.setattr(outputs, "Client", lambda address: self)

    async def made(self) -> list[Output]:
        prompts: Iterator[Prompt] = repeat(self._prompt)
        return await greedy_outputs(prompts, ClusterOptions(), self.words.append, minutes=60)

    @asynccontextmanager
    async def _running(self, *_: object) -> AsyncIterator[Any]:
        async def supervise() -> None:
            await self._given_up.wait()
            raise StartupError("5 starts in a row were of no use")

        async with side_by_side() as watching:
            supervising = watching.create_task(supervise())
            yield SimpleNamespace(coordinator="here:1")
            supervising.cancel()

    async def _prompt(self, client: object) -> tuple[int, ...]:
        return (1, 2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def describe(self) -> Any:
        return SimpleNamespace(batch_size=1)

    async def complete(self, request: object) -> Any:
        if self._left:
            self._left -= 1
            return SimpleNamespace(token_ids=[3])
        if self._request_fails:
            raise PeerFailed("a request failed")
        self._given_up.set()
        return await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("request_fails", "words"),
    [(True, "ended early: a request failed"), (False, "ended early: 5 starts in a row were of no use")],
)
async def test_whatever_ends_it_early_what_was_made_is_kept(
    monkeypatch: pytest.MonkeyPatch, request_fails: bool, words: str
) -> None:
    """A service that was given up lost the outputs of hours."""
    product = Product(monkeypatch, 7, request_fails=request_fails)
    assert await product.made() == [Output((1, 2, 3), 2)] * 7
    assert product.words == [words]


@pytest.mark.parametrize(("request_fails", "error"), [(True, PeerFailed), (False, StartupError)])
async def test_where_nothing_was_made_the_failure_is_raised(
    monkeypatch: pytest.MonkeyPatch, request_fails: bool, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await Product(monkeypatch, 0, request_fails=request_fails).made()


def test_prompts_answered_at_once_get_the_outputs_that_each_has_alone() -> None:
    """Prompts of several lengths are padded to one."""
    model = LlamaForCausalLM.from_pretrained(resolve_model("builtin:target"), dtype=torch.float32)
    prompts = [(2, 500, 501, 3), (2, *range(600, 611), 3), (2, 700, 3)]

    def answered(batches: list[list[tuple[int, ...]]], minutes: float = 60) -> set[Output]:
        return set(outputs.outputs_at_once(model, batches, lambda words: None, minutes=minutes, max_new_tokens=6))

    assert answered([prompts]) == answered([[one] for one in prompts])
    assert {(one.prompt_count, one.token_ids[: one.prompt_count]) for one in answered([prompts])} == {
        (len(one), one) for one in prompts
    }
    assert not answered([prompts], minutes=-1)


def test_a_batch_of_prompts_has_a_cache_of_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` makes each as long as the longest before it: short prompts after long ones took a GPU's memory."""
    model = LlamaForCausalLM.from_pretrained(resolve_model("builtin:target"), dtype=torch.float32)
    lengths: list[int] = []

    def made(max_cache_len: int, **keywords: Any) -> StaticCache:
        lengths.append(max_cache_len)
        return StaticCache(max_cache_len=max_cache_len, **keywords)

    monkeypatch.setattr("transformers.generation.utils.StaticCache", made)
    batches = [[(2, *range(500, 540), 3)], [(2, 500, 3)]]
    answers = outputs.outputs_at_once(model, batches, lambda words: None, minutes=60, max_new_tokens=4)
    assert len(list(answers)) == 2
    assert lengths[0] - lengths[1] == 39
