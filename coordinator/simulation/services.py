"""Model services that compute nothing: they keep the lengths of sequences, and answer after the time that it takes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from coordinator.protocols import Deadline, OnStreamEnd
from coordinator.rounds.round_report import NEW_TO_DRAFT
from coordinator.simulation.texts import Text, Texts
from paceline.checks import DECODED_TOKENS
from paceline.errors import PacelineError
from paceline.simulate.call_times import CallSeconds, CallTimes, Work
from paceline.simulate.result import ServiceUse
from paceline.simulate.saved_costs import SavedModel
from paceline.types import (
    CacheDescription,
    CallTiming,
    ModelDescription,
    ModelIdentity,
    Prefilled,
    PreparedDrafts,
    Proposal,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenizerFiles,
    Verdict,
    Verdicts,
    VerifyOutcome,
    VerifyRow,
)

NO_LIMIT = 2**31 - 1
SOME_TOKEN = 0


def described(model: SavedModel) -> ModelDescription:
    """Return a description of a model that takes sequences of any length, and calls of any number of them."""
    chunk = model.prefill_chunk_tokens
    cache = CacheDescription(token_bytes=model.token_bytes, max_length=NO_LIMIT, prefill_chunk_tokens=chunk)
    return ModelDescription(model.model_id, "", NO_LIMIT, "", NO_LIMIT, (), "", "", 0, cache=cache, max_rows=NO_LIMIT)


@dataclass(frozen=True)
class Surroundings:
    """What a service is placed in."""

    times: CallTimes
    round_trip_s: float
    """Beside that of the measurement."""
    rounds_at_once: Callable[[], int]
    rng: Random


@dataclass(eq=False)
class _Waiting:
    """A call that waits for a stage."""

    caller: object
    asked_s: float
    others_s: float = 0.0
    """Time in which the stage worked for other callers meanwhile."""


class _Stage:
    """One of a service's devices: works on one call after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting: list[_Waiting] = []

    async def work(self, caller: object, seconds: float) -> float:
        """Work on a call when its turn comes. Return the time in which it waited for calls of other callers."""
        clock = asyncio.get_running_loop().time
        call = _Waiting(caller, clock())
        self._waiting.append(call)
        async with self._turn:
            self._waiting.remove(call)
            began_s = clock()
            await asyncio.sleep(seconds)
            for one in self._waiting:
                if one.caller is not caller:
                    one.others_s += clock() - max(began_s, one.asked_s)
        return call.others_s


class SimulatedService:
    """One replica, which all coordinators share: calls pass its stages one after the other.

    A stage takes its part of a call's time, and nothing passes between stages that would take time.
    """

    def __init__(self, name: str, model: SavedModel, around: Surroundings, stage_count: int = 1) -> None:
        self.name = name
        self.model = model
        self._around = around
        self._stages = [_Stage() for _ in range(stage_count)]
        self._lengths: dict[str, int] = {}
        self._peak_tokens = self._call_count = 0
        self._busy_s = self._queued_s = self._worked_s = 0.0

    @property
    def rounds_at_once(self) -> int:
        return self._around.rounds_at_once()

    def free(self, sequence_ids: Sequence[str]) -> None:
        for sequence_id in sequence_ids:
            self._lengths.pop(sequence_id, None)

    def use(self, elapsed_s: float) -> ServiceUse:
        return ServiceUse(
            self.name,
            self._call_count,
            self._busy_s / elapsed_s if elapsed_s else 0.0,
            self._queued_s / self._call_count if self._call_count else 0.0,
            self._peak_tokens,
            self._peak_tokens * self.model.token_bytes,
        )

    def keep(self, sequence_id: str, length: int) -> int:
        self._lengths[sequence_id] = length
        return length

    async def work(self, caller: object, *passes: Work) -> CallTiming:
        """Let the time of a call pass, which has these passes."""
        self._peak_tokens = max(self._peak_tokens, sum(self._lengths.values()))
        took: list[CallSeconds] = [self._around.times.draw(one, self._around.rng) for one in passes]
        executed_s, one_way_s = sum(one.executed_s for one in took), (took[0].wire_s + self._around.round_trip_s) / 2
        own_s = took[0].own_s
        await asyncio.sleep(own_s + one_way_s)
        clock = asyncio.get_running_loop().time
        asked_s, stage_s = clock(), executed_s / len(self._stages)
        others_s = sum([await stage.work(caller, stage_s) for stage in self._stages])
        queued_s = max(0.0, clock() - asked_s - executed_s)
        self._call_count += 1
        self._busy_s += stage_s
        self._queued_s += queued_s
        self._worked_s += executed_s
        worked_s = self._worked_s
        await asyncio.sleep(one_way_s)
        # A coordinator takes time that no service accounts for as the way to it, which its own time is not.
        return CallTiming(own_s + queued_s, executed_s, others_s, worked_s)


class _Remote:
    """A service as one coordinator reaches it: what others ask there is work for others."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._description = described(service.model)

    async def is_serving(self, timeout_s: float) -> bool:
        return True

    async def describe(self, timeout_s: float) -> ModelDescription:
        return self._description

    def tell_stream_ends(self, on_end: OnStreamEnd) -> None:
        pass

    def trust(self, identity: ModelIdentity) -> None:
        pass

    def owe(self, sequence_ids: Sequence[str]) -> None:
        self._service.free(sequence_ids)

    @property
    def owed_count(self) -> int:
        return 0

    async def release(self) -> int:
        return 0

    async def close(self) -> None:
        pass

    def _prompt_shares(self, rows: Sequence[ProposeRow] | Sequence[VerifyRow]) -> list[int]:
        """Return the tokens that the service takes in of each row: one chunk of prompts a call, for all rows."""
        left, shares = self._service.model.prefill_chunk_tokens, []
        for row in rows:
            count = len(row.token_ids)
            share = count if count <= DECODED_TOKENS else min(count, left)
            left -= share if count > DECODED_TOKENS else 0
            shares.append(share)
        return shares


class SimulatedTarget(_Remote):
    def __init__(self, service: SimulatedService, texts: Texts) -> None:
        super().__init__(service)
        self._texts = texts
        self._begun: dict[str, tuple[Text, int]] = {}
        """Text of each sequence, with the length of its prompt."""

    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts:
        shares = self._prompt_shares(rows)
        results = [self._verdict(row, share) for row, share in zip(rows, shares, strict=True)]
        decided = [row for row, result in zip(rows, results, strict=True) if isinstance(result, Verdict)]
        counts = [len(row.draft_token_ids) for row in decided]
        prompt_count, at_once = sum(shares) - len(decided), self._service.rounds_at_once
        further = [row.further_count for row in decided]
        passes = [sum(count > place for count in further) for place in range(max(further, default=0))]
        timing = await self._service.work(
            self,
            Work(at_once, len(decided), max(counts, default=0), sum(counts), prompt_count),
            *(Work(at_once, row_count, 0, 0, 0) for row_count in passes),
        )
        return Verdicts([*results], timing)

    def _verdict(self, row: VerifyRow, share: int) -> VerifyOutcome:
        if not row.base_length:
            # The first token is the request's number.
            length = len(row.token_ids) + row.following_count
            self._begun.setdefault(row.sequence_id, (self._texts.of(row.token_ids[0]), length))
        length = row.base_length + share
        if row.following_count or share < len(row.token_ids):
            return Prefilled(self._service.keep(row.sequence_id, length))
        text, prompt_count = self._begun[row.sequence_id]
        accepted_count = text.accepted_count(length - prompt_count, len(row.draft_token_ids))
        length += accepted_count
        # There are no heads, so further rounds have no drafts.
        further = tuple(Verdict(0, SOME_TOKEN, length + place) for place in range(1, row.further_count + 1))
        self._service.keep(row.sequence_id, length + len(further))
        return Verdict(accepted_count, SOME_TOKEN, length, further=further)

    def owe(self, sequence_ids: Sequence[str]) -> None:
        super().owe(sequence_ids)
        for sequence_id in sequence_ids:
            self._begun.pop(sequence_id, None)

    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        return [RolledBack(self._service.keep(one.sequence_id, one.length), 0) for one in lengths]

    async def download_tokenizer(self) -> TokenizerFiles | None:
        return None


class SimulatedDraft(_Remote):
    def listen(self, take: Callable[[Sequence[PreparedDrafts]], None]) -> None:
        pass  # it prepares nothing

    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals:
        shares = self._prompt_shares(rows)
        results = [self._proposal(row, share) for row, share in zip(rows, shares, strict=True)]
        counts = [row.draft_count for row in rows]
        missed = sum(max(0, len(row.token_ids) - NEW_TO_DRAFT) for row in rows)
        at_once = self._service.rounds_at_once
        timing = await self._service.work(self, Work(at_once, len(rows), max(counts), sum(counts), missed))
        return Proposals([*results], timing)

    def _proposal(self, row: ProposeRow, share: int) -> Proposal:
        length = row.base_length + share
        if row.following_count or share < len(row.token_ids):
            return Proposal((), self._service.keep(row.sequence_id, length))
        cached = self._service.keep(row.sequence_id, length + row.draft_count - 1)
        return Proposal((SOME_TOKEN,) * row.draft_count, cached)
