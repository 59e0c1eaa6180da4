"""Which systems a bench runs: ours in all asked variants, and the peers beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from paceline.measure.equivalence.precision import Precision, with_precision
from paceline.process.launcher import ClusterOptions
from paceline.types import PAPER_POLICIES

SPECULATIVE, PLAIN = "speculative", "plain"
HUGGING_FACE, ASSISTED, ASSISTED_FIXED, LOOKUP = "hf", "hf-assisted", "hf-assisted-fixed", "hf-prompt-lookup"
LLAMA_CPP = "llama.cpp"
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
KINDS = (*PEERS, PLAIN, SPECULATIVE)
TITLES = {**PEERS, PLAIN: "Paceline, plain", SPECULATIVE: "Paceline"}


@dataclass(frozen=True)
class SystemSpec:
    """One system at one batch size."""

    kind: str
    batch_size: int
    precision: Precision
    policy: str = ""
    """Of our own speculative systems."""
    draft_count: str = ""
    """Where the number of drafts is given, and not the system's own affair."""

    @property
    def label(self) -> str:
        """What it is called in tables and plots, its batch size apart."""
        drafts = f"{self.draft_count} drafts" if self.draft_count else ""
        policy = "" if self.policy == "continuous" else self.policy
        precision = "" if self.precision.dtype == "auto" else str(self.precision)
        return ", ".join(part for part in (TITLES[self.kind], policy, drafts, precision) if part)

    @property
    def is_ours(self) -> bool:
        return self.kind in OURS


@dataclass(frozen=True)
class BenchPlan:
    pair: ClusterOptions
    """Models, device, memory; the rest varies."""
    kinds: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    policies: tuple[str, ...]
    draft_counts: tuple[str, ...]
    precisions: tuple[Precision, ...]
    max_new_tokens: int
    run_count: int
    gguf: Path | None = None


def groups(plan: BenchPlan) -> list[list[SystemSpec]]:
    """The systems that are up together, a group a batch size; what runs one at a time is in the first."""
    found = []
    for number, batch_size in enumerate(sorted(plan.batch_sizes)):
        kinds = [kind for kind in KINDS if kind in plan.kinds and (number == 0 or kind in (*BATCHING, *OURS))]
        specs = (
            spec
            for precision, kind in product(plan.precisions, kinds)
            for spec in _specs(plan, kind, batch_size, precision)
        )
        found.append(list(dict.fromkeys(specs)))  # two precisions may come to the same
    return found


def _specs(plan: BenchPlan, kind: str, batch_size: int, precision: Precision) -> Iterator[SystemSpec]:
    if kind == SPECULATIVE:
        for policy, draft_count in product(plan.policies, plan.draft_counts):
            yield SystemSpec(kind, batch_size, precision.under(policy), policy, draft_count)
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
    """How our services run for a system.

    Plain decoding has one lane and every core for the target, which is the most it can use. So has B = 1, where two
    lanes would be two sequences at once. No pass finds its prompts cached by the one before: peers compute theirs too.
    """
    policy = spec.policy or "continuous"
    one_lane = spec.kind == PLAIN or spec.batch_size == 1 or policy in PAPER_POLICIES
    return replace(
        with_precision(pair, spec.precision, policy),
        batch_size=spec.batch_size,
        prefix_sharing=False,
        draft_count=spec.draft_count or "0",
        lanes=1 if one_lane else pair.lanes,
    )
