"""Throughput of many systems in one invocation: start those of a batch size, run them in turn, keep every pass.

It owns the order of the work and the lives of the systems; `grid` says which systems, and `alternate` runs them.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version

from paceline.engine.model.checkpoint import find_checkpoint, label_of
from paceline.engine.model.loader import resolve_device
from paceline.measure.alternate import WARM_UP, alternate
from paceline.measure.bench import grid
from paceline.measure.bench.grid import BenchPlan, SystemSpec
from paceline.measure.bench.result import BenchResult, Floor, PromptPass, Run, SystemResult
from paceline.measure.cluster import ClusterSystem, running_system
from paceline.measure.contention import MachineWatch, Watch
from paceline.measure.equivalence.agreement import find_mismatches, no_gap
from paceline.measure.equivalence.precision import Precision
from paceline.measure.machine import describe_machine
from paceline.measure.peers.hugging_face import HuggingFacePeer, assistance, prompt_lookup
from paceline.measure.peers.llama_cpp import LlamaCppPeer
from paceline.measure.peers.local import LocalSystem, Peer
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.rounds import RowUse, row_use
from paceline.measure.system import Measured, System
from paceline.measure.traffic import copy_bandwidth, pass_traffic
from paceline.model_service.worker import ModelWorker
from paceline.process.cluster_plan import plan_cluster
from paceline.process.service import freeze_heap
from paceline.process.variables import NO_DRAFT
from paceline.types import ModelDescription, PassTraffic, Text


@dataclass(frozen=True)
class Observer:
    """Callbacks that tell how the work goes."""

    started: Callable[[str, int], None]
    """Gets the name of a part of the work and its number of steps."""
    advanced: Callable[[], None]
    measured: Callable[[BenchResult], None]
    """Gets all that is known after one more pass."""


@dataclass(frozen=True)
class _Part:
    """Prompts that are measured together."""

    prompts: Sequence[MeasuredPrompt]
    category: str | None = None
    """Their category, when it is measured by itself; None: all prompts."""

    @property
    def categories(self) -> dict[str, list[int]]:
        """The prompts' places by category."""
        found: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            found.setdefault(prompt.category, []).append(place)
        return found

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [prompt.token_ids for prompt in self.prompts]


@dataclass(frozen=True)
class _Pass:
    """A system's way over the prompts: to the end of outputs, or to their first token."""

    spec: SystemSpec
    is_prompts_alone: bool = False


class Bench:
    def __init__(
        self,
        plan: BenchPlan,
        prompts: Sequence[MeasuredPrompt],
        input_name: str,
        observer: Observer,
        watch: Watch | None = None,
    ) -> None:
        """`watch` tells which passes count; unset, it watches this machine."""
        self._plan = plan
        self._watch = watch or MachineWatch()
        whole = _Part(prompts)
        self._token_ids = whole.token_ids
        self._predictions = {one.token_ids: Text(one.prediction) for one in prompts if one.prediction is not None}
        alone = [_Part([prompts[place] for place in places], category) for category, places in whole.categories.items()]
        self._parts = [whole, *(alone if plan.by_category else ())]
        self._observer = observer
        self._first_outputs: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        """By dtype and prompt."""
        # Planned as `grid` asks for it where lanes are a choice, because variables may set what no flag sets.
        planned = plan_cluster(replace(plan.pair, policy="continuous"))
        self._device = resolve_device(planned.target.settings.device)
        # Peers run with the priority that their users give them.
        self._worker = ModelWorker(None, niceness=0)
        self._threads: dict[SystemSpec, int] = {}
        self._bandwidth_bytes_per_s = 0.0
        lanes = planned.coordinator.settings.lane_count
        self._result = _begun(plan, whole, input_name, self._device, lanes)

    async def run(self) -> None:
        """Run everything; `observer.measured` gets the result after each pass."""
        try:
            self._bandwidth_bytes_per_s = await self._worker.run(copy_bandwidth, self._device)
            for specs in grid.groups(self._plan):
                async with AsyncExitStack() as stack:
                    systems = await self._open(specs, stack)
                    stack.enter_context(_frozen_heap())
                    for part in self._parts:
                        name = ", ".join(filter(None, (f"B = {specs[-1].batch_size}", part.category)))
                        self._observer.started(name, len(systems) * (self._plan.run_count + 1))
                        record = partial(self._record, part)
                        await alternate(systems, part.token_ids, self._plan.run_count, record, self._watch)
        finally:
            # In a thread, because it waits until an interrupted pass ends, at the pass's next token.
            await asyncio.to_thread(self._worker.close)

    def _note_floor(self, dtype: str, target: ModelDescription, draft: ModelDescription | None) -> None:
        """Keep the floor of a dtype, by the first system of ours with a draft, or without where none has one.

        Its models tell how many bytes a weight has.
        """
        known = next((one for one in self._result.floors if one.dtype == dtype), None)
        if known and (draft is None or known.draft.weight_bytes):
            return
        others = tuple(one for one in self._result.floors if one is not known)
        pair = self._plan.pair
        draft_traffic = pass_traffic(pair.draft_model, draft) if draft else PassTraffic(0, 0)
        floor = Floor(dtype, self._bandwidth_bytes_per_s, pass_traffic(pair.target_model, target), draft_traffic)
        self._result = replace(self._result, floors=(*others, floor))

    async def _open(self, specs: Sequence[SystemSpec], stack: AsyncExitStack) -> dict[_Pass, System]:
        """Start our clusters and load the peers' models, each model once."""
        load = cache(lambda model, precision: HuggingFaceReference(model, precision.dtype, self._device))
        systems: dict[_Pass, System] = {}
        for spec in specs:
            self._observer.started(f"starting {spec.label}", 1)
            if spec.is_ours:
                ours = await stack.enter_async_context(self._running(spec))
                systems[_Pass(spec)] = ours
                if self._plan.max_new_tokens > 1:
                    systems[_Pass(spec, is_prompts_alone=True)] = ours.with_limit(1)
                self._note_floor(spec.precision.dtype, *await ours.models())
            else:
                peer = await self._worker.run(self._peer, spec, load)
                systems[_Pass(spec)] = local = LocalSystem(self._worker, peer)
                trial = self._token_ids[: spec.batch_size]
                self._threads[spec] = await local.take_fastest_threads(trial, self._watch)
        return systems

    def _running(self, spec: SystemSpec) -> AbstractAsyncContextManager[ClusterSystem]:
        return running_system(
            grid.cluster_options(spec, self._plan.pair),
            self._plan.max_new_tokens,
            sources=spec.sources,
            predictions=self._predictions,
        )

    def _peer(self, spec: SystemSpec, load: Callable[[str, Precision], HuggingFaceReference]) -> Peer:
        plan = self._plan
        if spec.kind == grid.LLAMA_CPP:
            assert plan.gguf is not None
            return LlamaCppPeer(plan.gguf, plan.max_new_tokens, max(map(len, self._token_ids)) + plan.max_new_tokens)
        if spec.kind in grid.WITH_DRAFT_MODEL:
            # Loaded for this system alone, because the number of drafts is a setting of the model.
            draft = HuggingFaceReference(plan.pair.draft_model, spec.precision.dtype, self._device)
            options = assistance(draft, int(spec.draft_count) if spec.draft_count else None)
        else:
            # Of no other kind: one that nobody makes would be measured as Hugging Face's own.
            options = {grid.HUGGING_FACE: {}, grid.LOOKUP: prompt_lookup()}[spec.kind]
        return HuggingFacePeer(
            load(plan.pair.target_model, spec.precision), plan.max_new_tokens, spec.batch_size, options
        )

    def _record(self, part: _Part, passed: _Pass, number: int, measured: Measured) -> None:
        self._observer.advanced()
        if passed.is_prompts_alone:
            if number != WARM_UP:
                one = PromptPass(measured.elapsed_s, measured.contention)
                self._change(part, passed.spec, lambda known: replace(known, prompt_passes=(*known.prompt_passes, one)))
            return
        dtype = passed.spec.precision.dtype
        outputs = zip(part.token_ids, measured.outputs, strict=True)
        first = [self._first_outputs.setdefault((dtype, prompt), output) for prompt, output in outputs]
        if number == WARM_UP:
            return
        run = Run(
            measured.elapsed_s,
            measured.output_count,
            measured.rounds,
            tuple(find_mismatches(part.prompts, measured.outputs, first, no_gap)),
            measured.contention,
            _rows_by_category(part, measured),
        )
        self._change(part, passed.spec, lambda known: replace(known, runs=(*known.runs, run)))

    def _change(self, part: _Part, spec: SystemSpec, change: Callable[[SystemResult], SystemResult]) -> None:
        """Keep a changed result of a system, and tell the observer."""
        result = self._result
        kept = result.systems if part.category is None else result.by_category.get(part.category, ())
        known = {one.spec: one for one in kept}
        known[spec] = change(known.get(spec, SystemResult(spec, threads=self._threads.get(spec))))
        changed = tuple(known.values())
        if part.category is None:
            self._result = replace(result, systems=changed)
        else:
            self._result = replace(result, by_category=result.by_category | {part.category: changed})
        self._observer.measured(self._result)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep garbage collection from what is there: scanning peers' libraries takes a core from services for 0.1 s."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()  # the peers' models go with the block


def _begun(plan: BenchPlan, whole: _Part, input_name: str, device: str, lanes: int) -> BenchResult:
    """Return the result before anything is measured."""
    return BenchResult(
        _label(plan.pair.target_model),
        _label(plan.pair.draft_model),
        device,
        input_name,
        len(whole.prompts),
        sum(map(len, whole.token_ids)),
        plan.max_new_tokens,
        describe_machine(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        {name: version(name) for name in ("paceline", "torch", "transformers")},
        plan.run_count,
        lanes,
        categories={category: len(places) for category, places in whole.categories.items()},
    )


def _rows_by_category(part: _Part, measured: Measured) -> dict[str, RowUse]:
    if not measured.usages:
        return {}
    return {name: row_use([measured.usages[place] for place in places]) for name, places in part.categories.items()}


def _label(model: str) -> str:
    return "no draft model" if model == NO_DRAFT else label_of(model, find_checkpoint(model).config)
