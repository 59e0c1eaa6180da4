"""The model's thread: what waits is served together, and what runs between calls keeps a call waiting only once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from threading import Event
from typing import Any

import pytest
import torch

from paceline.engine.calls import Call
from paceline.errors import InvalidRequest, StartupError
from paceline.model_service import ranks, serving
from paceline.model_service.worker import NICENESS, ModelWorker
from paceline.process.ranks import Ranks
from paceline.scope import Caller
from paceline.types import RankGrid, RankPlace, VerifyRow
from paceline.wire import ServerOptions
from target_service.config import TargetSettings


async def test_work_between_calls_begins_when_no_call_waits_or_runs() -> None:
    worker, go_on, ran = ModelWorker(1), Event(), list[str]()

    def call(name: str) -> None:
        go_on.wait()
        ran.append(name)

    calls = [asyncio.create_task(worker.run(call, name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    between = asyncio.create_task(worker.run_between(lambda: ran.append("between")))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*calls, between)
    assert ran == ["first", "second", "between"]
    worker.close()


async def test_a_call_waits_for_one_piece_of_work_at_most() -> None:
    worker, begun, go_on, ran = ModelWorker(1), Event(), Event(), list[str]()

    def piece() -> None:
        begun.set()
        go_on.wait()
        ran.append("between")

    async def keep_working() -> None:
        while len(ran) < 4:
            await worker.run_between(piece)

    working = asyncio.create_task(keep_working())
    await asyncio.to_thread(begun.wait)
    call = asyncio.create_task(worker.run(ran.append, "call"))
    await asyncio.sleep(0)
    go_on.set()
    await call
    assert ran[:2] == ["between", "call"]
    await working
    worker.close()


def call(name: str, caller: str = "") -> Call[VerifyRow]:
    """A call of one row; each has a caller of its own if none is given."""
    return Call([VerifyRow(name, 0, (1,), ())], Caller(caller or name))


class Names:
    """Serves calls by the names of their sequences, and fails for those that are called `bad`."""

    def __init__(self) -> None:
        self.turns: list[list[str]] = []

    def work(self, calls: Sequence[Call[VerifyRow]]) -> list[str]:
        names = [one.rows[0].sequence_id for one in calls]
        self.turns.append(names)
        if "bad" in names:
            raise InvalidRequest("bad")
        return names


@asynccontextmanager
async def busy_worker() -> AsyncIterator[ModelWorker]:
    """A worker whose thread is busy until the block has slept once."""
    worker, go_on = ModelWorker(1), Event()
    running = asyncio.create_task(worker.run(go_on.wait))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, go_on.set)
    yield worker
    await running
    worker.close()


async def test_calls_that_wait_are_served_together_and_each_gets_its_own_result() -> None:
    names = Names()
    async with busy_worker() as worker:
        calls = [call("a", "one"), call("b", "two"), call("c", "two"), call("d", "three")]
        asked = [asyncio.create_task(worker.run_call(names.work, one, 1)) for one in calls]
        assert [result for result, _ in await asyncio.gather(*asked)] == ["a", "b", "c", "d"]
    assert names.turns == [["a", "b", "d"], ["c"]]


async def test_a_bad_call_fails_alone() -> None:
    names = Names()
    async with busy_worker() as worker:
        asked = [asyncio.create_task(worker.run_call(names.work, call(name), 1)) for name in ("a", "bad", "b")]
        first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(first, tuple) and isinstance(last, tuple) and isinstance(failed, InvalidRequest)
        assert (first[0], last[0]) == ("a", "b")


async def test_a_call_that_is_given_up_leaves_the_queue() -> None:
    names = Names()
    async with busy_worker() as worker:
        asked = [asyncio.create_task(worker.run_call(names.work, call(name), 1)) for name in ("a", "gone", "b")]
        await asyncio.sleep(0)
        asked[1].cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert names.turns == [["a", "b"]]


async def test_the_parts_of_calls_add_up_to_the_work_and_others_work_is_told() -> None:
    names = Names()
    async with busy_worker() as worker:
        asked = [
            asyncio.create_task(worker.run_call(names.work, one, token_count))
            for one, token_count in ((call("a", "one"), 3), (call("b", "two"), 1), (call("c", "one"), 1))
        ]
        a, b, c = [timing for _, timing in await asyncio.gather(*asked)]
    assert a.executed_s == pytest.approx(3 * b.executed_s)
    assert a.others_s == pytest.approx(b.executed_s)
    assert b.others_s == pytest.approx(a.executed_s)
    assert c.others_s == pytest.approx(b.executed_s), "it waited for its own caller's call, too"
    assert c.queued_s >= c.others_s
    assert a.worked_s == b.worked_s == pytest.approx(a.executed_s + b.executed_s)
    assert c.worked_s == pytest.approx(a.worked_s + c.executed_s)


async def test_a_call_that_finds_nobody_working_waits_for_nobody() -> None:
    """What its thread took to wake was told as waiting, and simulated services wait for other calls alone."""
    names = Names()
    with closing(ModelWorker(1)) as worker:
        for _ in range(3):
            _, timing = await worker.run_call(names.work, call("a", "one"), 1)
            assert timing.executed_s > 0
            assert timing.queued_s == pytest.approx(0.0, abs=1e-9)


async def test_nothing_is_others_work_with_one_caller() -> None:
    names = Names()
    async with busy_worker() as worker:
        asked = [asyncio.create_task(worker.run_call(names.work, call(name, "one"), 1)) for name in "abc"]
        timings = [timing for _, timing in await asyncio.gather(*asked)]
    assert [timing.others_s for timing in timings] == [0.0] * 3
    assert names.turns == [["a"], ["b"], ["c"]]


async def test_what_waits_when_the_worker_is_closed_is_cancelled() -> None:
    worker, begun, go_on = ModelWorker(1), Event(), Event()

    def block() -> None:
        begun.set()
        go_on.wait()

    running = asyncio.create_task(worker.run(block))
    await asyncio.to_thread(begun.wait)
    waiting = asyncio.create_task(worker.run_call(Names().work, call("a"), 1))
    await asyncio.sleep(0)
    go_on.set()
    worker.close()
    await running
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("lanes", [1, 2])
async def test_calls_that_come_while_another_works_share_the_next_turn(lanes: int) -> None:
    counts, began, go_on = list[int](), Event(), Event()
    worker = ModelWorker(None, lanes=lanes, on_turn=counts.append)

    def work(calls: Sequence[Call[VerifyRow]]) -> list[int]:
        began.set()
        go_on.wait()
        return [len(calls)] * len(calls)

    async def served(name: str) -> int:
        count, timing = await worker.run_call(work, Call([VerifyRow(name, 0, (1,), ())], Caller(name)), 1)
        assert 0 <= timing.others_s <= timing.queued_s + timing.executed_s
        return count

    first = asyncio.create_task(served("1"))
    await asyncio.to_thread(began.wait)
    others = [asyncio.create_task(served(name)) for name in "234"]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(first, *others) == [1, 3, 3, 3]
    assert counts == [1, 3]
    worker.close()


@pytest.mark.parametrize(("has_gpu", "niceness"), [(True, 0), (False, NICENESS)])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_thread_that_feeds_a_gpu_waits_for_no_core_in_any_rank(
    rank: int, has_gpu: bool, niceness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ranks after the first it gave way to all else, and the others waited for it."""

    def worker(*_: Any, **asked: Any) -> Any:
        raise StartupError(f"niceness {asked['niceness']}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for module in (serving, ranks):
        monkeypatch.setattr(module, "ModelWorker", worker)
    own = Ranks(RankPlace(rank, RankGrid(2, 1)), are_here=False)
    with pytest.raises(StartupError, match=f"niceness {niceness}$"):
        await serving.serve_model("target_service", TargetSettings(), ServerOptions(), own, "", lambda *_: None)
