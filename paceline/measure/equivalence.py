"""Are outputs those of the target alone? Protocol of arXiv 2510.22876: SpecBench's first turns, raw, greedily decoded.

Owns the order of the work and what counts as a failure; `agreement` owns the arithmetic.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from pydantic import TypeAdapter

from paceline.engine.loader import resolve_device
from paceline.engine.reference import HuggingFaceReference
from paceline.engine.worker import ModelWorker
from paceline.launcher import CORES, ClusterOptions
from paceline.measure.agreement import MatchRates, Mismatch, find_mismatches, match_rates, pooled
from paceline.measure.cluster import running_system
from paceline.measure.precision import Precision, with_precision
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.reference_outputs import identity_of, reference_outputs
from paceline.text import TextCodec

HUGGING_FACE, PLAIN = "Hugging Face", "plain decoding"
Outputs = list[list[int]]


@dataclass(frozen=True)
class EquivalencePlan:
    pair: ClusterOptions
    """Models, device and draft length; the rest varies."""
    max_new_tokens: int
    batch_sizes: tuple[int, ...]
    policies: tuple[str, ...]
    precisions: tuple[Precision, ...]


@dataclass(frozen=True)
class Agreement:
    """What one system's outputs are beside a reference's."""

    system: str
    policy: str
    batch_size: int
    precision: str
    reference: str
    must_hold: bool
    """Whether a difference is a failure, and not what rounding may do in this precision."""
    rates: tuple[MatchRates, ...]
    mismatches: tuple[Mismatch, ...]

    @property
    def overall(self) -> MatchRates:
        return pooled(self.rates)

    @property
    def failed(self) -> bool:
        return self.must_hold and bool(self.mismatches)


@dataclass(frozen=True)
class EquivalenceResult:
    target_model: str
    draft_model: str
    draft_count: str
    input_file: str
    prompt_count: int
    max_new_tokens: int
    machine: str = field(default_factory=lambda: f"{platform.machine()}, {CORES} cores")
    agreements: tuple[Agreement, ...] = ()

    @property
    def failed(self) -> bool:
        return any(one.failed for one in self.agreements)

    def to_json(self) -> str:
        return TypeAdapter(EquivalenceResult).dump_json(self, indent=1).decode()


@dataclass(frozen=True)
class Observer:
    """Whom the work tells how it goes."""

    started: Callable[[str, int], None]
    """A part of the work and how many steps it has."""
    advanced: Callable[[], None]
    agreed: Callable[[Agreement], None]


async def measure_equivalence(
    plan: EquivalencePlan, prompts: Sequence[MeasuredPrompt], codec: TextCodec, folder: Path, observer: Observer
) -> None:
    """Run all cases; `observer.agreed` gets each agreement as soon as it is known."""
    worker = ModelWorker(None)
    try:
        for precision in plan.precisions:
            comparison = await _references(plan, precision, prompts, codec, folder, worker, observer)
            for policy, batch_size in product(plan.policies, plan.batch_sizes):
                observer.started(f"{precision} {policy} B = {batch_size}", 1)
                outputs = await _outputs(plan, precision, policy, batch_size, prompts, None)
                observer.advanced()
                for one in await comparison.agreements("speculative", policy, batch_size, outputs):
                    observer.agreed(one)
    finally:
        worker.close()


@dataclass(frozen=True)
class _Comparison:
    """One precision's reference outputs, and how to compare with them."""

    precision: Precision
    prompts: Sequence[MeasuredPrompt]
    codec: TextCodec
    hugging_face: HuggingFaceReference
    worker: ModelWorker
    references: dict[str, Outputs]

    async def agreements(self, system: str, policy: str, batch_size: int, outputs: Outputs) -> list[Agreement]:
        return [
            Agreement(
                system,
                policy,
                batch_size,
                str(self.precision),
                name,
                self._must_hold(name),
                tuple(match_rates(self.prompts, outputs, reference, self.codec)),
                tuple(
                    await self.worker.run(
                        find_mismatches, self.prompts, outputs, reference, self.hugging_face.logit_gap
                    )
                ),
            )
            for name, reference in self.references.items()
        ]

    def _must_hold(self, reference: str) -> bool:
        if self.precision.dtype == "float32":
            return True
        return reference == PLAIN and self.precision.numerics == "strict"


async def _references(
    plan: EquivalencePlan,
    precision: Precision,
    prompts: Sequence[MeasuredPrompt],
    codec: TextCodec,
    folder: Path,
    worker: ModelWorker,
    observer: Observer,
) -> _Comparison:
    """Our own outputs of plain decoding at the largest batch size, and Hugging Face's at batch 1.

    Plain decoding comes first: services that cannot start say so before anything long.
    """
    model, batch_size = plan.pair.target_model, max(plan.batch_sizes)
    observer.started(f"{precision} {PLAIN}, B = {batch_size}", 1)
    plain = await _outputs(plan, precision, "continuous", batch_size, prompts, 0)
    observer.started(f"{precision.dtype} {HUGGING_FACE} generate, batch 1", len(prompts))
    hugging_face = await worker.run(HuggingFaceReference, model, precision.dtype, resolve_device(plan.pair.device))
    expected = await reference_outputs(
        hugging_face,
        worker,
        prompts,
        plan.max_new_tokens,
        identity=identity_of(model, precision.dtype),
        file=folder / f"reference-{precision.dtype}.jsonl",
        advance=observer.advanced,
    )
    beside_hugging_face = _Comparison(precision, prompts, codec, hugging_face, worker, {HUGGING_FACE: expected})
    for one in await beside_hugging_face.agreements("plain", "continuous", batch_size, plain):
        observer.agreed(one)
    return replace(beside_hugging_face, references={HUGGING_FACE: expected, PLAIN: plain})


async def _outputs(
    plan: EquivalencePlan,
    precision: Precision,
    policy: str,
    batch_size: int,
    prompts: Sequence[MeasuredPrompt],
    max_draft_count: int | None,
) -> Outputs:
    options = replace(with_precision(plan.pair, precision, policy), batch_size=batch_size)
    async with running_system(options, plan.max_new_tokens, max_draft_count) as system:
        return (await system.run([one.token_ids for one in prompts])).outputs
