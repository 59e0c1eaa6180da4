"""Where draft tokens come from, and what a request says about it. No source can change an output."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class DraftSource(StrEnum):
    UNSPECIFIED = "unspecified"
    """A source that this version does not know."""
    DRAFT = "draft"
    """A draft service."""
    SUFFIX = "suffix"
    """What followed the same tokens earlier, in the prompt or an output."""
    PREDICTION = "prediction"
    """The output that the client expects."""
    HEADS = "heads"
    """The target's own heads."""


SOURCE_NAMES = tuple(one.value for one in DraftSource if one is not DraftSource.UNSPECIFIED)
"""Words for the sources that a request may name."""


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """What a request says about its drafts, beside their number."""

    sources: tuple[DraftSource, ...] = ()
    """Sources that may draft for it; empty: all."""
    in_order: bool = False
    """Whether the first of `sources` that has tokens drafts, instead of the one that pays best."""
    forbidden_sources: tuple[DraftSource, ...] = ()
    draft_model: str = ""
    """Model of the draft service that may draft, as its description names it; empty: any."""

    def allows(self, source: DraftSource) -> bool:
        return source not in self.forbidden_sources and (not self.sources or source in self.sources)

    def puts_first(self, source: DraftSource, other: DraftSource) -> bool:
        """Return whether one of `sources` comes before another one, in their order."""
        return self.sources.index(source) < self.sources.index(other)


@dataclass(slots=True)
class SourceUsage:
    """Draft tokens of one source."""

    source: DraftSource
    model: str = ""
    """The draft service's model; empty for other sources."""
    drafted_count: int = 0
    accepted_count: int = 0

    @property
    def name(self) -> str:
        """The source, with its model if it has one."""
        return f"{self.source.value} {self.model}".rstrip()


UsageSums: TypeAlias = dict[tuple[DraftSource, str], SourceUsage]
"""A usage for each source and model, which nobody else holds."""


def added_up(usages: Iterable[SourceUsage]) -> tuple[SourceUsage, ...]:
    """Return one usage for each source and model, in the order in which they come first."""
    sums: UsageSums = {}
    for one in usages:
        add_usage(sums, one.source, one.model, one.drafted_count, one.accepted_count)
    return tuple(sums.values())


def add_usage(sums: UsageSums, source: DraftSource, model: str, drafted_count: int, accepted_count: int) -> None:
    """Add counts to the sums of their source and model, in place."""
    name = source, model
    usage = sums.get(name) or sums.setdefault(name, SourceUsage(*name))
    usage.drafted_count += drafted_count
    usage.accepted_count += accepted_count
