"""The systems that a bench runs: ours in all variants asked for, and the peers beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from paceline.measure.equivalence.precision import Precision, with_precision
from paceline.measure.source_sets import ALL_SOURCES, SourceSet, may_draft, name_of, needs_draft_service, needs_heads
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.variables import NO_DRAFT, NO_HEADS
from paceline.types import PAPER_POLICIES, DraftSource

SPECULATIVE, PLAIN = "speculative", "plain"
HUGGING_FACE, ASSISTED, ASSISTED_FIXED, LOOKUP = "hf", "hf-assisted", "hf-assisted-fixed", "hf-prompt-lookup"
LLAMA_CPP = "llama.cpp"
CONTINUOUS = "continuous"
OURS = (SPECULATIVE, PLAIN)
PEERS = {
    HUGGING_FACE: "HF generate",
    ASSISTED: "HF assisted",
    ASSISTED_FIXED: "HF assisted",
    LOOKUP: "HF prompt lookup",
    LLAMA_CPP: "llama.cpp",
}
"""What tables call them, in their order."""
BATCHING = (HUGGING_FACE,)
"""Peers that decode more than one sequence at a time."""
WITH_DRAFT_MODEL = (ASSISTED, ASSISTED_FIXED)
"""Peers that draft with the pair's draft model; left out where the pair has none."""
KINDS = (*PEERS, PLAIN, SPECULATIVE)
HEADS = "heads"
"""Asks for a speculative system with the drafts of the target's heads alone, and no draft service."""
SYSTEMS = (*KINDS, HEADS)
"""What can be asked for."""
COMPARED = (PLAIN, *PEERS)
"""What our systems are compared with, in the tables' order."""
TITLES = {**PEERS, PLAIN: "Paceline, plain", SPECULATIVE: "Paceline"}


@dataclass(frozen=True)
class SystemSpec:
    """One system at one batch size."""

    kind: str
    batch_size: int
    precision: Precision
    policy: str = ""
    """Policy of our own speculative systems; empty for the others."""
    draft_count: str = ""
    """Draft tokens a round; empty when the system decides itself."""
    sources: SourceSet = ALL_SOURCES
    """What may draft in our own speculative systems."""

    @property
    def label(self) -> str:
        """Name in tables and plots, without the batch size."""
        drafts = f"{self.draft_count} drafts" if self.draft_count else ""
        drafts += f" from {name_of(self.sources)}" if self.sources else ""
        policy = "" if self.policy == CONTINUOUS else self.policy
        precision = "" if str(self.precision) == "auto" else str(self.precision)
        return ", ".join(part for part in (TITLES[self.kind], policy, drafts, precision) if part)

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS


@dataclass(frozen=True)
class BenchPlan:
    pair: ClusterOptions
    """Models, device and memory; the other options vary."""
    kinds: tuple[str, ...]
    """Of `SYSTEMS`."""
    batch_sizes: tuple[int, ...]
    policies: tuple[str, ...]
    draft_counts: tuple[str, ...]
    precisions: tuple[Precision, ...]
    max_new_tokens: int
    run_count: int
    gguf: Path | None = None
    source_sets: tuple[SourceSet, ...] = (ALL_SOURCES,)
    by_category: bool = False
    """Whether each category's prompts are measured by themselves too."""


def groups(plan: BenchPlan) -> list[list[SystemSpec]]:
    """Return the systems that are up together, one group for each batch size; one-at-a-time peers are in the first.

    A batch size that leaves no system has no group.
    """
    found = []
    left_out = WITH_DRAFT_MODEL if plan.pair.draft_model == NO_DRAFT else ()
    asked = [kind for kind in SYSTEMS if kind in plan.kinds and kind not in left_out]
    for number, batch_size in enumerate(sorted(plan.batch_sizes)):
        kinds = [kind for kind in asked if number == 0 or kind in (*BATCHING, *OURS, HEADS)]
        specs = (
            spec
            for precision, kind in product(plan.precisions, kinds)
            for spec in _specs(plan, kind, batch_size, precision)
        )
        found.append(list(dict.fromkeys(specs)))  # two precisions may give the same system
    return [specs for specs in found if specs]


def _specs(plan: BenchPlan, kind: str, batch_size: int, precision: Precision) -> Iterator[SystemSpec]:
    if kind == SPECULATIVE:
        for policy, draft_count, sources in product(plan.policies, plan.draft_counts, plan.source_sets):
            if not may_draft(plan.pair, policy, sources):
                continue  # it would be plain decoding under another name
            yield SystemSpec(kind, batch_size, precision.under(policy), policy, draft_count, sources)
    elif kind == HEADS:
        for draft_count in plan.draft_counts:
            own = precision.under(CONTINUOUS)
            yield SystemSpec(SPECULATIVE, batch_size, own, CONTINUOUS, draft_count, (DraftSource.HEADS,))
    elif kind == PLAIN:
        yield SystemSpec(kind, batch_size, precision)
    else:
        fixed = next((one for one in plan.draft_counts if one.isdecimal() and one != "0"), "5")
        yield SystemSpec(
            kind,
            batch_size if kind in BATCHING else 1,
            Precision(precision.dtype),  # numerics are ours
            draft_count=fixed if kind == ASSISTED_FIXED else "",
        )


def cluster_options(spec: SystemSpec, pair: ClusterOptions) -> ClusterOptions:
    """Return the options of our services for a system.

    Plain decoding has one lane and every core for the target, which is the most it can use. B = 1 has one lane too, as
    two lanes would be two generations at once. Prefix sharing is off, because peers compute every prompt in each pass.
    A system whose drafts come from no draft service has none, and so the cores that it would take; nor has it heads
    that may not draft.
    """
    policy = spec.policy or CONTINUOUS
    one_lane = spec.kind == PLAIN or spec.batch_size == 1 or policy in PAPER_POLICIES
    served = with_precision(pair, spec.precision, policy)
    has_heads = spec.kind == SPECULATIVE and needs_heads(spec.sources)
    return replace(
        served,
        batch_size=spec.batch_size,
        prefix_sharing=False,
        draft_count=spec.draft_count or "0",
        lanes=1 if one_lane else pair.lanes,
        draft_model=pair.draft_model if needs_draft_service(spec.sources) else NO_DRAFT,
        heads=served.heads if has_heads else NO_HEADS,
    )
