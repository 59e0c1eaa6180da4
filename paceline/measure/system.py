"""The interface of a measured system: it answers all prompts and tells how long it took."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.measure.contention import Contention
from paceline.measure.rounds import RoundUse
from paceline.types import Usage


@dataclass(frozen=True)
class Measured:
    """One pass over all prompts."""

    outputs: list[list[int]]
    """Token ids by prompt, up to and with the end token."""
    elapsed_s: float
    rounds: RoundUse | None = None
    """Use of the rounds; None for systems that do not report rounds."""
    contention: Contention | None = None
    """How others disturbed the machine; None if nobody watched."""
    usages: tuple[Usage, ...] = ()
    """Usage by prompt; empty for systems that do not report it."""

    @property
    def output_count(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.output_count / self.elapsed_s


class System(Protocol):
    async def run(self, prompts: Sequence[tuple[int, ...]]) -> Measured:
        """Answer all prompts, given at once."""
        ...
