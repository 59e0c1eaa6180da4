"""Model services without a model, which answer after the times that were measured or that are given.

`timed_services` runs them as one process: `python -m benchmarks.timed_services TARGETS DRAFTS`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from benchmarks.commands import run_command
from benchmarks.instant_models import (
    MAX_LENGTH,
    InstantDrafter,
    InstantVerifier,
    ModelServices,
    NoModel,
    builtin_tokenizer,
    model_services,
    served,
)
from paceline.engine.calls import Call
from paceline.simulate.measured_rounds import MeasuredRounds
from paceline.simulate.saved_costs import read_costs
from paceline.types import Proposal, ProposeRow, VerifyOutcome, VerifyRow
from paceline.wire import termination

app = typer.Typer(add_completion=False, help=__doc__)
CallSeconds = Callable[[int, int], float]
"""Seconds of a call by its rows and the most drafts of one."""
CostsFile = Annotated[
    Path | None, typer.Option(help="what `paceline simulate --save-costs` wrote; none: the times below")
]
VerifyTime = Annotated[float, typer.Option(help="milliseconds of a verify call")]
DraftTime = Annotated[float, typer.Option(help="milliseconds of a propose call")]


class TimedDrafter(InstantDrafter):
    def __init__(self, runner: NoModel, seconds: CallSeconds) -> None:
        super().__init__(runner)
        self._seconds = seconds

    def propose_calls(self, calls: Sequence[Call[ProposeRow]]) -> list[list[Proposal]]:
        rows = [row for call in calls for row in call.rows]
        time.sleep(self._seconds(len(rows), max(row.draft_count for row in rows)))
        return super().propose_calls(calls)


class TimedVerifier(InstantVerifier):
    def __init__(self, runner: NoModel, seconds: CallSeconds) -> None:
        super().__init__(runner)
        self._seconds = seconds

    def verify_calls(self, calls: Sequence[Call[VerifyRow]]) -> list[list[VerifyOutcome]]:
        rows = [row for call in calls for row in call.rows]
        time.sleep(self._seconds(len(rows), max(len(row.draft_token_ids) for row in rows)))
        return super().verify_calls(calls)


@app.command()
def main(
    targets: int, drafts: int, costs: CostsFile = None, verify_ms: VerifyTime = 20.0, draft_ms: DraftTime = 8.0
) -> None:
    """Serve so many timed models until standard input ends; prints the addresses of drafts, then of targets."""
    measured = MeasuredRounds(read_costs(costs)) if costs else None
    verify_s: CallSeconds = measured.verify_s if measured else lambda rows, count: verify_ms / 1e3
    draft_s: CallSeconds = measured.draft_s if measured else lambda rows, count: draft_ms / 1e3
    uvloop.run(_serve(targets, drafts, verify_s, draft_s))


async def _serve(target_count: int, draft_count: int, verify_s: CallSeconds, draft_s: CallSeconds) -> None:
    model = NoModel(builtin_tokenizer(), MAX_LENGTH)
    async with AsyncExitStack() as stack:
        drafts = [served(TimedDrafter(model, draft_s)) for _ in range(draft_count)]
        targets = [served(TimedVerifier(model, verify_s)) for _ in range(target_count)]
        for several in (drafts, targets):
            print(",".join([await stack.enter_async_context(one) for one in several]), flush=True)
        await termination(stop_with_stdin=True)


def timed_services(*flags: str) -> AbstractAsyncContextManager[ModelServices]:
    return model_services("benchmarks.timed_services", *flags)


if __name__ == "__main__":
    run_command(app)
