"""Tasks that run side by side, and work that outlasts its caller."""

import asyncio
import gc

import pytest

from paceline.tasks import outlasting, side_by_side


async def fail() -> None:
    try:
        raise OSError("the cause")
    except OSError as error:
        raise ValueError("the failure") from error


async def test_a_failure_comes_out_as_it_is_with_its_cause() -> None:
    with pytest.raises(ValueError, match="the failure") as raised:
        async with side_by_side() as group:
            group.create_task(fail())
    assert isinstance(raised.value.__cause__, OSError)


async def test_work_that_outlasts_its_caller_may_fail_unseen(caplog: pytest.LogCaptureFixture) -> None:
    ending, tasks = asyncio.Event(), set[asyncio.Task[None]]()

    async def work() -> None:
        await ending.wait()
        raise ValueError("late")

    caller = asyncio.create_task(outlasting(work(), tasks))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    (left,) = tasks
    ending.set()
    await asyncio.wait([left])
    del left
    gc.collect()
    assert caller.cancelled() and not tasks and not caplog.records


async def test_a_caller_sees_how_work_that_could_outlast_it_ends() -> None:
    async def work(is_good: bool) -> int:
        if not is_good:
            raise ValueError("wrong")
        return 5

    assert await outlasting(work(True), set()) == 5
    with pytest.raises(ValueError, match="wrong"):
        await outlasting(work(False), set())
