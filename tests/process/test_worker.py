"""The model's thread: what runs between calls never keeps a call waiting for more than one piece of work."""

import asyncio
from threading import Event

from paceline.model_service.worker import ModelWorker


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
