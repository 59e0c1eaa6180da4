"""Protocols of everything the coordinator calls: drafters, verifiers, and the services behind them.

All drafters share one signature and one convention, from the scheduler's own down to the client of a service. A call
that fails as a whole raises a PacelineError; a row that fails has its error in the row's place. The same holds for
verifiers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PacelineError
from paceline.types import (
    ModelDescription,
    ModelIdentity,
    PreparedDrafts,
    Proposals,
    ProposeRow,
    RolledBack,
    SequenceLength,
    TokenizerFiles,
    Verdicts,
    VerifyRow,
)


@dataclass(frozen=True)
class Deadline:
    """Limits on the time of a call for drafts."""

    timeout_s: float | None = None
    """Seconds until the deadlines of the group's requests; None: no limit."""
    worth_s: float | None = None
    """Seconds that the drafts can save; a longer call costs more than it saves. None: not known yet."""


ANY_TIME = Deadline()

OnStreamEnd = Callable[[PacelineError | None], None]
"""Called when a stream of calls has ended; with an error, if the service sent something that nobody asked for."""


class Releases(Protocol):
    def owe(self, sequence_ids: list[str]) -> None:
        """Leave sequences to be freed by the next request, or by `release`."""
        ...

    async def release(self) -> int:
        """Free what is owed now; return how many sequences. Those that the service did not hear of stay owed."""
        ...


class Proposes(Protocol):
    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals: ...


class Drafter(Proposes, Releases, Protocol):
    @property
    def max_length(self) -> int:
        """Most tokens of a generation that can get drafts."""
        ...

    @property
    def prefill_chunk_tokens(self) -> int:
        """Prompt tokens computed in one call."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of a call; 0 if unknown."""
        ...


class Drafters(Releases, Protocol):
    """The drafters of all models."""

    @property
    def usable(self) -> Mapping[str, Drafter]:
        """Drafters that can be asked now, by their model."""
        ...


class Verifies(Protocol):
    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts: ...


class Verifier(Verifies, Releases, Protocol):
    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        """Cut sequences to the given lengths and return what each freed."""
        ...


class GuardedVerifier(Verifier, Protocol):
    """A verifier that is given up when its calls fail."""

    @property
    def is_given_up(self) -> bool: ...

    def tried(self) -> None:
        """Note the end of a round. If it was the target's trial but made no call, the next round is the trial."""
        ...


class Remote(Releases, Protocol):
    """The calls that every model service answers."""

    async def is_serving(self, timeout_s: float) -> bool: ...
    async def describe(self, timeout_s: float) -> ModelDescription: ...
    def tell_stream_ends(self, on_end: OnStreamEnd) -> None:
        """Have `on_end` called whenever a stream of calls ends, as those of a service do that is about to stop."""
        ...

    def trust(self, identity: ModelIdentity) -> None:
        """Accept answers from this process only: its model was checked."""
        ...

    @property
    def owed_count(self) -> int: ...

    async def close(self) -> None: ...


class RemoteDraft(Remote, Proposes, Protocol):
    """A draft service."""

    def listen(self, take: Callable[[Sequence[PreparedDrafts]], None]) -> None:
        """Give what the service tells unasked to `take`, from now on."""
        ...


class RemoteTarget(Remote, Verifier, Protocol):
    """A target service."""

    async def download_tokenizer(self) -> TokenizerFiles | None:
        """Return the tokenizer; None when the target has none: then prompts and outputs are token ids only."""
        ...
