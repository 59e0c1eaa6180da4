"""Sets of sources that may draft, compared with each other: their words, such as `suffix`, `draft+suffix`, or `all`."""

from paceline.errors import InvalidRequest
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_DRAFT, NO_HEADS
from paceline.types import PAPER_POLICIES, SOURCE_NAMES, DraftSource

SourceSet = tuple[DraftSource, ...]
ALL_SOURCES: SourceSet = ()
"""No limit."""
ALL = "all"


def read_source_set(word: str) -> SourceSet:
    """Read a word. Raise InvalidRequest unless it is `all`, or sources with `+` between them."""
    if word == ALL:
        return ALL_SOURCES
    names = word.split("+")
    if wrong := [name for name in names if name not in SOURCE_NAMES]:
        raise InvalidRequest(
            f"--source-sets has {wrong[0]!r}; give {ALL}, or any of {', '.join(SOURCE_NAMES)}, with + between those "
            "that may draft together",
            field="source_sets",
        )
    return tuple(map(DraftSource, dict.fromkeys(names)))


def needs_draft_service(sources: SourceSet) -> bool:
    return sources == ALL_SOURCES or DraftSource.DRAFT in sources


def needs_heads(sources: SourceSet) -> bool:
    return sources == ALL_SOURCES or DraftSource.HEADS in sources


def name_of(sources: SourceSet) -> str:
    """Return the word of a set."""
    return "+".join(one.value for one in sources) or ALL


def may_draft(pair: ClusterOptions, policy: str, sources: SourceSet) -> bool:
    """Return whether something may draft; under the paper's policies nothing but a draft service does."""
    may = {*(sources or DraftSource)} - {DraftSource.UNSPECIFIED}
    if pair.draft_model == NO_DRAFT:
        may.discard(DraftSource.DRAFT)
    if pair.heads == NO_HEADS:
        may.discard(DraftSource.HEADS)
    return bool(may & {DraftSource.DRAFT} if policy in PAPER_POLICIES else may)
