"""Throughput of many systems in one invocation: start those of a batch size, run them in turn, keep every pass.

It owns the order of the work and the lives of the systems; `grid` says which systems, and `alternate` runs them.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version

from paceline.engine.model.checkpoint import find_checkpoint, label_of
from paceline.engine.model.loader import resolve_device
from paceline.measure.alternate import WARM_UP, alternate
from paceline.measure.bench import grid
from paceline.measure.bench.grid import BenchPlan, SystemSpec
from paceline.measure.bench.result import BenchResult, Floor, Run, SystemResult
from paceline.measure.cluster import running_system
from paceline.measure.contention import MachineWatch, Watch
from paceline.measure.equivalence.agreement import find_mismatches, no_gap
from paceline.measure.equivalence.precision import Precision
from paceline.measure.machine import describe_machine
from paceline.measure.peers.hugging_face import HuggingFacePeer, assistance, prompt_lookup
from paceline.measure.peers.llama_cpp import LlamaCppPeer
from paceline.measure.peers.local import LocalSystem, Peer
from paceline.measure.peers.reference import HuggingFaceReference
from paceline.measure.prompts import MeasuredPrompt
from paceline.measure.system import Measured, System
from paceline.measure.traffic import copy_bandwidth, pass_traffic
from paceline.model_service.worker import ModelWorker
from paceline.process.launcher import plan_cluster
from paceline.process.variables import NO_DRAFT
from paceline.types import ModelDescription, PassTraffic


@dataclass(frozen=True)
class Observer:
    """Callbacks that tell how the work goes."""

    started: Callable[[str, int], None]
    """Gets the name of a part of the work and its number of steps."""
    advanced: Callable[[], None]
    measured: Callable[[BenchResult], None]
    """Gets all that is known after one more pass."""


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
        self._prompts = prompts
        self._token_ids = [prompt.token_ids for prompt in prompts]
        self._observer = observer
        self._first_outputs: dict[str, list[list[int]]] = {}
        # Planned as `grid` asks for it where lanes are a choice, because variables may set what no flag sets.
        planned = plan_cluster(replace(plan.pair, policy="continuous"))
        self._device = resolve_device(planned.target.settings.device)
        # Peers run with the priority that their users give them.
        self._worker = ModelWorker(None, niceness=0)
        self._threads: dict[SystemSpec, int] = {}
        self._bandwidth_bytes_per_s = 0.0
        self._result = BenchResult(
            _label(plan.pair.target_model),
            _label(plan.pair.draft_model),
            self._device,
            input_name,
            len(prompts),
            sum(map(len, self._token_ids)),
            plan.max_new_tokens,
            describe_machine(),
            datetime.now(UTC).isoformat(timespec="seconds"),
            {name: version(name) for name in ("paceline", "torch", "transformers")},
            plan.run_count,
            planned.coordinator.settings.lane_count,
        )

    async def run(self) -> None:
        """Run everything; `observer.measured` gets the result after each pass."""
        try:
            self._bandwidth_bytes_per_s = await self._worker.run(copy_bandwidth, self._device)
            for specs in grid.groups(self._plan):
                async with AsyncExitStack() as stack:
                    systems = await self._open(specs, stack)
                    self._observer.started(f"B = {specs[-1].batch_size}", len(systems) * (self._plan.run_count + 1))
                    await alternate(systems, self._token_ids, self._plan.run_count, self._record, self._watch)
        finally:
            # In a thread, because it waits until an interrupted pass ends, at the pass's next token.
            await asyncio.to_thread(self._worker.close)

    def _note_floor(self, dtype: str, target: ModelDescription, draft: ModelDescription | None) -> None:
        """Keep the floor of the first system of ours in a dtype; its models tell how many bytes a weight has."""
        if any(one.dtype == dtype for one in self._result.floors):
            return
        pair = self._plan.pair
        draft_traffic = pass_traffic(pair.draft_model, draft) if draft else PassTraffic(0, 0)
        floor = Floor(dtype, self._bandwidth_bytes_per_s, pass_traffic(pair.target_model, target), draft_traffic)
        self._result = replace(self._result, floors=(*self._result.floors, floor))

    async def _open(self, specs: Sequence[SystemSpec], stack: AsyncExitStack) -> dict[SystemSpec, System]:
        """Start our clusters and load the peers' models, each model once."""
        load = cache(lambda model, precision: HuggingFaceReference(model, precision.dtype, self._device))
        systems: dict[SystemSpec, System] = {}
        for spec in specs:
            self._observer.started(f"starting {spec.label}", 1)
            if spec.is_ours:
                options = grid.cluster_options(spec, self._plan.pair)
                ours = await stack.enter_async_context(running_system(options, self._plan.max_new_tokens))
                systems[spec] = ours
                self._note_floor(spec.precision.dtype, *await ours.models())
            else:
                peer = await self._worker.run(self._peer, spec, load)
                systems[spec] = local = LocalSystem(self._worker, peer)
                trial = self._token_ids[: spec.batch_size]
                self._threads[spec] = await local.take_fastest_threads(trial, self._watch)
        return systems

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

    def _record(self, spec: SystemSpec, number: int, measured: Measured) -> None:
        self._observer.advanced()
        first = self._first_outputs.setdefault(spec.precision.dtype, measured.outputs)
        if number == WARM_UP:
            return
        run = Run(
            measured.elapsed_s,
            measured.output_count,
            measured.rounds,
            tuple(find_mismatches(self._prompts, measured.outputs, first, no_gap)),
            measured.contention,
        )
        known = {one.spec: one for one in self._result.systems}
        before = known.get(spec, SystemResult(spec, threads=self._threads.get(spec)))
        known[spec] = replace(before, runs=(*before.runs, run))
        self._result = replace(self._result, systems=tuple(known.values()))
        self._observer.measured(self._result)


def _label(model: str) -> str:
    return "no draft model" if model == NO_DRAFT else label_of(model, find_checkpoint(model).config)
