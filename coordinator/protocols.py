"""All that the coordinator asks of others: drafters, verifiers, and the services behind them.

Every drafter, from the scheduler's own down to the client of a service, has one signature and one convention: a call
that fails as a whole raises a PacelineError, a row that fails has its error in the row's place. So have verifiers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import PacelineError
from paceline.types import (
    ModelDescription,
    ModelIdentity,
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
    """How long a call for drafts may take, in seconds."""

    timeout_s: float | None = None
    """What the group's requests have left; None: any time."""
    worth_s: float | None = None
    """More than this costs more than drafts save; None: not known yet."""


class Releases(Protocol):
    async def release(self, sequence_ids: list[str]) -> None:
        """Free generations. What is not heard stays owed."""
        ...


class Proposes(Protocol):
    async def propose(self, rows: Sequence[ProposeRow], deadline: Deadline) -> Proposals: ...


class Drafter(Proposes, Releases, Protocol):
    @property
    def max_length(self) -> int:
        """Tokens a generation may have to get drafts; 0 while there are none to be had."""
        ...

    @property
    def prefill_chunk_tokens(self) -> int:
        """Prompt tokens that are computed in one call."""
        ...


class Verifies(Protocol):
    async def verify(self, rows: Sequence[VerifyRow], timeout_s: float | None = None) -> Verdicts: ...


class Verifier(Verifies, Releases, Protocol):
    async def rollback(self, lengths: Sequence[SequenceLength]) -> list[RolledBack | PacelineError]:
        """Cut generations to lengths; tell what each freed."""
        ...


class GuardedVerifier(Verifier, Protocol):
    """A verifier that is given up where its calls fail."""

    @property
    def is_given_up(self) -> bool: ...

    def tried(self) -> None:
        """A round is over: if it was to show whether the target works, and came to no call, the next one is to."""
        ...


class Remote(Releases, Protocol):
    """What every model service can be asked."""

    async def is_serving(self, timeout_s: float) -> bool: ...
    async def describe(self, timeout_s: float) -> ModelDescription: ...
    def trust(self, identity: ModelIdentity) -> None:
        """Take answers of this process only: it was seen to fit."""
        ...

    def owe(self, sequence_ids: list[str]) -> None:
        """Leave generations to be freed by the next `release`."""
        ...

    @property
    def owed_count(self) -> int: ...

    async def close(self) -> None: ...


class RemoteDraft(Remote, Proposes, Protocol):
    """A draft service."""


class RemoteTarget(Remote, Verifier, Protocol):
    """A target service."""

    async def download_tokenizer(self) -> TokenizerFiles | None:
        """Return None when the target has no tokenizer: then prompts and outputs are token ids only."""
        ...
