"""Comparison of outputs with the target's own by arXiv 2510.22876: SpecBench's first turns, raw, decoded greedily.

Sampled outputs are compared with plain decoding's of the same seed alone: Hugging Face draws by another rule.
This module owns the order of the work and what counts as a failure; `agreement` owns the arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from pydantic import TypeAdapter

from paceline.engine.model.loader import resolve_device
from paceline.errors import InvalidRequest, ModelChanged
from paceline.measure.cluster import Predictions, running_system
from paceline.measure.equivalence.agreement import (
    LogitGap,
    MatchRates,
    Mismatch,
    find_mismatches,
    match_rates,
    no_gap,
    pooled,
)
from paceline.measure.equivalence.precision import Precision, with_precision
from paceline.measure.machine import describe_machine
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.peers.reference_outputs import identity_of, reference_outputs
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.source_sets import ALL_SOURCES, SourceSet, may_draft, name_of
from paceline.model_service.worker import ModelWorker
from paceline.process.cluster_plan import ClusterOptions, plan_cluster
from paceline.text import TextCodec
from paceline.types import PAPER_POLICIES, DraftSource, ModelDescription, SamplingParameters, TokenIds

HUGGING_FACE, PLAIN = "Hugging Face", "plain decoding"
WRONG_EVERY = 10
"""One token in so many of a prediction is wrong."""
Outputs = list[list[int]]


@dataclass(frozen=True)
class EquivalencePlan:
    pair: ClusterOptions
    """Models, device and draft length; the other options vary."""
    max_new_tokens: int
    batch_sizes: tuple[int, ...]
    policies: tuple[str, ...]
    precisions: tuple[Precision, ...]
    source_sets: tuple[SourceSet, ...] = (ALL_SOURCES,)
    temperature: float = 0.0
    """0 decodes greedily."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of one system's outputs with a reference's."""

    system: str
    policy: str
    batch_size: int
    precision: str
    reference: str
    must_hold: bool
    """Whether a difference is a failure; if False, rounding may cause it in this precision."""
    rates: tuple[MatchRates, ...]
    mismatches: tuple[Mismatch, ...]
    sources: SourceSet = ALL_SOURCES
    """What might draft."""

    @property
    def policy_and_sources(self) -> str:
        return _policy_and_sources(self.policy, self.sources)

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
    temperature: float = 0.0
    machine: str = field(default_factory=describe_machine)
    agreements: tuple[Agreement, ...] = ()

    @property
    def failed(self) -> bool:
        return any(one.failed for one in self.agreements)

    def to_json(self) -> str:
        return TypeAdapter(EquivalenceResult).dump_json(self, indent=1).decode()


@dataclass(frozen=True)
class Observer:
    """Callbacks that tell how the work goes."""

    started: Callable[[str, int], None]
    """Gets the name of a part of the work and its number of steps."""
    advanced: Callable[[], None]
    agreed: Callable[[Agreement], None]


@dataclass(frozen=True)
class _References:
    """The reference outputs of one precision, and what gives logit gaps."""

    precision: Precision
    outputs: dict[str, Outputs]
    logit_gap: LogitGap = no_gap


@dataclass(frozen=True)
class _Case:
    """What one pass of ours is run with."""

    policy: str
    batch_size: int
    sources: SourceSet = ALL_SOURCES

    @property
    def policy_and_sources(self) -> str:
        return _policy_and_sources(self.policy, self.sources)


def _policy_and_sources(policy: str, sources: SourceSet) -> str:
    """Return a policy's name, with what may draft unless all may."""
    return f"{policy}, {name_of(sources)}" if sources else policy


def _cases(plan: EquivalencePlan) -> list[_Case]:
    """Return what is compared: what something drafts for.

    Raise InvalidRequest where nothing is left, which would pass for outputs that are equal.
    """
    if plan_cluster(plan.pair).coordinator.settings.draft_count == 0:
        raise InvalidRequest(
            "--draft-count is 0, which leaves plain decoding to compare with itself; give 1 or more, or auto",
            field="draft_count",
        )
    found = [
        _Case(policy, batch_size, sources)
        for policy, sources, batch_size in product(plan.policies, plan.source_sets, plan.batch_sizes)
        if may_draft(plan.pair, policy, sources)
    ]
    if not found:
        named, policies = ", ".join(map(name_of, plan.source_sets)), ", ".join(plan.policies)
        papers = " and ".join(sorted(PAPER_POLICIES))
        raise InvalidRequest(
            f"--source-sets has {named}, of which nothing drafts with --draft-model {plan.pair.draft_model} and "
            f"--heads {plan.pair.heads} under --policies {policies} (a draft service alone under {papers}); give a set "
            "that drafts",
            field="source_sets",
        )
    return found


def partly_wrong(output: Sequence[int]) -> list[int]:
    """Return an output in which every tenth token is its first one, to predict what does not come."""
    return [output[0] if place % WRONG_EVERY == WRONG_EVERY - 1 else token for place, token in enumerate(output)]


def must_equal(reference: str, precision: Precision, quantization: str) -> bool:
    """Return whether outputs in a precision are promised to equal the reference's; `quantization` is the target's."""
    # Of rows that are rounded to int8, numbers on the edge of two fall to either.
    is_precise = precision.dtype == "float32" and quantization != "w8a8"
    return is_precise or (reference == PLAIN and precision.is_strict(quantization))


class Equivalence:
    """One measurement; `observer.agreed` gets each agreement as soon as it is known."""

    def __init__(
        self,
        plan: EquivalencePlan,
        prompts: Sequence[MeasuredPrompt],
        codec: TextCodec,
        folder: Path,
        observer: Observer,
    ) -> None:
        """Keep Hugging Face's outputs in `folder`. Raise InvalidRequest for a plan that compares nothing."""
        self._plan = plan
        self._cases = _cases(plan)
        self._prompts = prompts
        self._codec = codec
        self._folder = folder
        self._observer = observer
        settings = plan_cluster(plan.pair).target.settings
        self._device, self._quantization = resolve_device(settings.device), settings.quantization
        self._worker = ModelWorker(None)
        self._targets: dict[Precision, ModelDescription] = {}
        """Target that decoded plainly, by precision."""

    async def run(self) -> None:
        """Run every case. Raise ModelChanged when strict outputs would be of targets that are not one model."""
        try:
            for precision in self._plan.precisions:
                references = await self._references(precision)
                for case in self._cases:
                    outputs = await self._outputs(precision, case, self._predictions(case.sources, references))
                    await self._compare(references, "speculative", case, outputs)
        finally:
            self._worker.close()

    async def _references(self, precision: Precision) -> _References:
        """Return our own outputs of plain decoding at the largest batch size; of greedy, Hugging Face's at batch 1 too.

        Plain decoding runs first, so that services that cannot start fail before the long part.
        """
        case = _Case("continuous", max(self._plan.batch_sizes))
        plain = await self._outputs(precision, case, max_draft_count=0)
        if self._plan.temperature:
            return _References(precision, {PLAIN: plain})
        self._observer.started(f"{precision.dtype} {HUGGING_FACE} generate, batch 1", len(self._prompts))
        model = self._plan.pair.target_model
        as_served = precision.dtype, self._device, self._quantization
        hugging_face = await self._worker.run(HuggingFaceReference, model, *as_served)
        expected = await reference_outputs(
            hugging_face,
            self._worker,
            self._prompts,
            self._plan.max_new_tokens,
            identity=identity_of(model, *as_served),
            file=self._folder / f"reference-{precision.dtype}.jsonl",
            advance=self._observer.advanced,
        )
        references = _References(precision, {HUGGING_FACE: expected}, hugging_face.logit_gap)
        await self._compare(references, "plain", case, plain)
        return replace(references, outputs={HUGGING_FACE: expected, PLAIN: plain})

    def _predictions(self, sources: SourceSet, references: _References) -> Predictions:
        """Return plain decoding's outputs, with some tokens wrong, for a set that names predictions; else none."""
        if DraftSource.PREDICTION not in sources:
            return {}
        outputs = zip(self._prompts, references.outputs[PLAIN], strict=True)
        return {prompt.token_ids: TokenIds(tuple(partly_wrong(output))) for prompt, output in outputs}

    async def _outputs(
        self,
        precision: Precision,
        case: _Case,
        predictions: Predictions | None = None,
        max_draft_count: int | None = None,
    ) -> Outputs:
        kind = PLAIN if max_draft_count == 0 else case.policy_and_sources
        self._observer.started(f"{precision} {kind}, B = {case.batch_size}", 1)
        options = replace(
            with_precision(self._plan.pair, precision, case.policy, self._quantization), batch_size=case.batch_size
        )
        as_asked = self._plan.max_new_tokens, max_draft_count, case.sources, predictions
        sampling = SamplingParameters(self._plan.temperature)
        async with running_system(options, *as_asked, sampling) as system:
            self._check_target(precision, case, (await system.models())[0])
            measured = await system.run([one.token_ids for one in self._prompts])
        self._observer.advanced()
        return measured.outputs

    def _check_target(self, precision: Precision, case: _Case, target: ModelDescription) -> None:
        """Refuse to compare strict outputs of targets that were loaded otherwise: they are not promised to be equal."""
        first = self._targets.setdefault(precision, target)
        is_same = target.identity.model_digest == first.identity.model_digest
        if target.numerics == "strict" and not is_same:
            raise ModelChanged(
                f"the target under {case.policy_and_sources} was loaded with {target.kernels}, that of {PLAIN} with "
                f"{first.kernels}; run again, and change nothing of the installation meanwhile"
            )

    async def _compare(self, references: _References, system: str, case: _Case, outputs: Outputs) -> None:
        precision = references.precision.under(case.policy, self._quantization)
        for name, expected in references.outputs.items():
            mismatches = await self._worker.run(find_mismatches, self._prompts, outputs, expected, references.logit_gap)
            self._observer.agreed(
                Agreement(
                    system,
                    case.policy,
                    case.batch_size,
                    str(precision),
                    name,
                    must_equal(name, precision, self._quantization),
                    tuple(match_rates(self._prompts, outputs, expected, self._codec)),
                    tuple(mismatches),
                    case.sources,
                )
            )
