"""The model that is served, and the rule by which another one takes its place.

- While a target is left that was seen to fit, every other target must run the same model and take generations at least
  as long; else it is refused.
- When none is left, the next target that answers decides what is served from then on. If that is another model, all
  generations end, because their tokens are of the former one. If it is the same, only those end that no longer fit.

Judges every target and draft, the first target too. Knows nothing of rounds or of clients' calls.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import structlog

from coordinator.door.admission import Admission
from coordinator.door.served import Served, check_pair, check_same_model, differing_field, named, read_served
from coordinator.protocols import Remote, RemoteTarget
from coordinator.replicas.replica import CHECK_TIMEOUT_S, Replica
from coordinator.requests.generation import Generation
from paceline.errors import IncompatiblePair, ModelChanged, ModelNotUsable, PacelineError, PeerUnavailable
from paceline.types import ModelDescription

log = structlog.get_logger()

MOST_TOLD = 64
"""Names of drafts, or of kernels, that are told of: a service may have another one at every look."""


class Targets(Protocol):
    def has_fitting(self, besides: Replica[Remote]) -> bool:
        """Return whether another target is left that was seen to fit."""
        ...

    def end(self, reason: Callable[[Generation], PacelineError | None]) -> None:
        """End every unfinished generation for which `reason` returns an error."""
        ...


class Drafts(Protocol):
    def look_anew(self, reason: PacelineError) -> None:
        """Ask no draft replica before it was looked at again."""
        ...


class CurrentModel:
    def __init__(self, make_admission: Callable[[Served], Admission], targets: Targets, drafts: Drafts) -> None:
        self._make_admission = make_admission
        self._targets = targets
        self._drafts = drafts
        self._admission: Admission | None = None
        self._other_kernels, self._unread = _Told(), _Told()
        """Kernels of targets that differ from the first, and drafts that lack tokens, by name."""

    @property
    def admission(self) -> Admission:
        """Admission to the model served now; a new object whenever that changes. Needs a first target."""
        assert self._admission
        return self._admission

    @property
    def target(self) -> ModelDescription:
        """Description of the model served now, as its first target gave it."""
        return self.admission.served.target

    @property
    def known_target(self) -> ModelDescription | None:
        """As `target`; None before the first target."""
        return self._admission.served.target if self._admission else None

    async def check_target(self, replica: Replica[RemoteTarget], model: ModelDescription) -> None:
        """Raise IncompatiblePair unless the model is like the served one. Serve it when no fitting target is left."""
        if not self._targets.has_fitting(replica):
            await self._replace(replica, model)
        self._check_like(model)

    async def check_draft(self, replica: Replica[Remote], model: ModelDescription) -> None:
        """Raise IncompatiblePair unless the model can draft for the served one."""
        check_pair(model, self.target)
        self._tell_unread(model)

    def _tell_unread(self, draft: ModelDescription) -> None:
        """Warn of a draft that cannot read all tokens. Vocabularies tell nothing of that: they are padded."""
        text = self.admission.served.text
        if text is None or text.token_count <= draft.vocabulary_size or not self._unread.note(draft.model_id):
            return
        log.warning(
            "the draft lacks tokens of the target; outputs with one of them, in the prompt or before the end, get no "
            "more drafts: if that is a token of the chat template, choose another draft",
            draft=draft.model_id,
            first_lacking_id=draft.vocabulary_size,
            target_token_count=text.token_count,
        )

    async def _replace(self, replica: Replica[RemoteTarget], model: ModelDescription) -> None:
        before = self._admission
        if before and differing_field(model, before.served.target) is None:
            self._resize(before.served, model)
            return
        served = await _read_served(replica.remote, model)
        if self._admission is not before or self._targets.has_fitting(replica):
            await self.check_target(replica, model)  # another was faster
            return
        self._admission = self._make_admission(served)
        self._other_kernels, self._unread = _Told(), _Told()
        if before:
            self._end_all(before.served.target, model)

    def _end_all(self, before: ModelDescription, now: ModelDescription) -> None:
        log.warning("another model is served", before=named(before), now=named(now))
        words = (
            f"{named(before)} was served, and {named(now)} has taken its place; what was received is of the former: "
            "ask again without received_outputs and model_digest, or where the former is served"
        )
        self._targets.end(lambda generation: ModelChanged(words))
        self._drafts.look_anew(PeerUnavailable("another target model is served; whether it fits is looked at"))

    def _resize(self, served: Served, model: ModelDescription) -> None:
        """Serve the same model with the limits of its new target."""
        if model.lasting == served.target.lasting:
            return
        self._tell_kernels(model)
        self._admission = self._make_admission(replace(served, target=model))
        longest, before = model.longest_sequence, served.target.longest_sequence
        if longest >= before:
            return
        log.warning("the target takes shorter sequences than before", before=before, now=longest)

        def reason(generation: Generation) -> PacelineError | None:
            most = len(generation.token_ids) + generation.output.remaining_count
            if most <= longest:
                return None
            return PeerUnavailable(
                f"the request may come to {most} tokens, and the target that is there now takes {longest} at most; "
                "ask for fewer with max_new_tokens, or where a larger cache is"
            )

        self._targets.end(reason)

    def _check_like(self, model: ModelDescription) -> None:
        check_same_model(model, self.target)
        if model.longest_sequence < self.target.longest_sequence:
            raise IncompatiblePair(
                f"a target replica takes sequences of {model.longest_sequence} tokens, and what is served "
                f"{self.target.longest_sequence}: what was accepted could not go on there; give it as much --kv-memory"
            )
        self._tell_kernels(model)

    def _tell_kernels(self, model: ModelDescription) -> None:
        if model.kernels == self.target.kernels or not self._other_kernels.note(model.kernels):
            return
        log.warning(
            "a target replica computes with other kernels than the first: an output that goes on there may be "
            "rounded otherwise, which decides between close logits; strict numerics refuse that",
            kernels=model.kernels,
            first=self.target.kernels,
        )


class _Told:
    """Names that were told of while one model is served."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, name: str) -> bool:
        """Note that a name is told of. Return whether it is the first time, of as many names as are told of."""
        is_first = name not in self._names and len(self._names) < MOST_TOLD
        if is_first:
            self._names.add(name)
        return is_first


async def _read_served(remote: RemoteTarget, model: ModelDescription) -> Served:
    """Return the model with its tokenizer. Raise PeerUnavailable when another model took its address meanwhile."""
    files = await remote.download_tokenizer()
    again = await remote.describe(CHECK_TIMEOUT_S)
    if (again.identity, again.lasting) != (model.identity, model.lasting):
        raise PeerUnavailable(f"{named(model)} was replaced while its tokenizer was read")
    try:
        return await asyncio.to_thread(read_served, model, files)
    except ModelNotUsable as error:
        raise IncompatiblePair(error.message) from error
