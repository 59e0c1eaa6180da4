"""One replica of a model service: whether it is there, whether its model fits, and whether it may be used.

Owns the regular checks, through the standard health service and the model's description. The users of the replica
decide what a change means. Knows nothing of sequences or rounds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import structlog

from coordinator.protocols import Remote
from paceline.errors import IncompatiblePair, PacelineError, PeerUnavailable
from paceline.types import CircuitState, ModelDescription, ReplicaDescription, ReplicaState

log = structlog.get_logger()

CHECK_INTERVAL_S = 0.5
UP_CHECK_INTERVAL_S = 2.0
"""Of one that was found up: its calls tell when it fails, and the ends of their streams when it is about to stop."""
CHECK_TIMEOUT_S = 3.0
FAILED_CHECKS_TO_LOSE = 2
"""Failed checks in a row of a replica that was up or draining: one may be a broken connection or a machine busy for a
moment."""
CHECKS_BETWEEN_DESCRIPTIONS = 3
"""Checks after which the replica's description, with the use of its cache, is read again."""

RemoteT_co = TypeVar("RemoteT_co", bound=Remote, covariant=True)


class Replica(Generic[RemoteT_co]):
    def __init__(
        self,
        address: str,
        remote: RemoteT_co,
        check_fit: Callable[["Replica[RemoteT_co]", ModelDescription], Awaitable[None]],
        on_change: Callable[["Replica[RemoteT_co]"], None] = lambda replica: None,
    ) -> None:
        """`check_fit` raises IncompatiblePair when this coordinator cannot work with a model."""
        self.address = address
        self._remote = remote
        self.description: ModelDescription | None = None
        """Its latest description; None before the first."""
        self.state = ReplicaState.DOWN
        self.fits = False
        """Whether its model was checked and no look has found it gone or changed since."""
        self.error: PacelineError | None = None
        """Why it is down or refused; None while that is not known."""
        self.looked = asyncio.Event()
        """Set when the first look has ended."""
        self.is_named = True
        """Whether a name leads to it. If none does it gets nothing new, and may live for ever all the same."""
        self._check_fit = check_fit
        self._on_change = on_change
        self._checks = 0
        self._failed_checks = 0
        self._unasked_count = 0
        """Messages that nobody asked for."""
        self._look_soon = asyncio.Event()

    @property
    def remote(self) -> RemoteT_co:
        return self._remote

    @property
    def is_up(self) -> bool:
        return self.state is ReplicaState.UP

    @property
    def is_silent(self) -> bool:
        """Whether it was lost because it answers no checks."""
        return self._failed_checks >= FAILED_CHECKS_TO_LOSE

    @property
    def _was_found(self) -> bool:
        """Whether the latest look or call found it there, to be used or about to go."""
        return self.state in (ReplicaState.UP, ReplicaState.DRAINING)

    @property
    def kv_use(self) -> float:
        """Share of its cache that sequences held at its latest description; 0 if unknown."""
        cache = self.description.cache if self.description else None
        return cache.used_bytes / cache.capacity_bytes if cache and cache.capacity_bytes else 0.0

    def described(self, sequence_count: int, circuit: CircuitState) -> ReplicaDescription:
        """Return what callers are told of it; `sequence_count` generations are placed on it."""
        model_id = self.description.model_id if self.description else ""
        return ReplicaDescription(self.address, self.state, sequence_count, circuit, model_id)

    def lose(self, error: PacelineError) -> None:
        """Mark the replica down after a call found it gone, and look now, with a new description.

        It fits as before until that look: a lost connection does not mean that the service is gone.
        """
        self._lose(error, fits=self.fits)

    def look_soon(self) -> None:
        """Look again at once: the last finding may be out of date."""
        self._look_soon.set()

    def set_named(self, is_named: bool) -> None:
        """Note whether a name still leads to the replica. If none does, it is about to go and gets nothing new."""
        if is_named is not self.is_named:
            self.is_named = is_named
            self._look_soon.set()

    async def watch(self) -> None:
        """Look at the replica again and again until cancelled."""
        self._remote.tell_stream_ends(self._stream_ended)
        while True:
            self._look_soon.clear()
            await self.look()
            interval_s = UP_CHECK_INTERVAL_S if self.is_up and not self._failed_checks else CHECK_INTERVAL_S
            # Python 3.11's `wait_for` forgets that it was cancelled if it need not wait any more in that moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._look_soon.wait()

    def _stream_ended(self, wrong: PacelineError | None) -> None:
        """Look again. What nobody asked for harms no request: of such messages the first, second, fourth are told."""
        if wrong:
            self._unasked_count += 1
            if self._unasked_count.bit_count() == 1:
                log.warning("a stream was ended", address=self.address, error=str(wrong), count=self._unasked_count)
        self.look_soon()

    async def look(self) -> None:
        """Ask the replica for its health, and once in a while for its description."""
        try:
            if await self._remote.is_serving(CHECK_TIMEOUT_S):
                await self._describe()
                if not self._was_found:
                    # Before it is used: it may next be given a sequence that it still owes to free.
                    await self._release_owed()
                self._set(ReplicaState.UP if self.is_named else ReplicaState.DRAINING)
            else:
                self._set(ReplicaState.DRAINING)
            self._failed_checks = 0
            await self._try_release_owed()
        except IncompatiblePair as error:
            self._set(ReplicaState.REFUSED, IncompatiblePair(f"{self.address}: {error.message}"), fits=False)
            # It may be the process that was used until another model was served, with all that it cached.
            await self._try_release_owed()
        except PacelineError as error:
            self._failed_checks += 1
            if not self._was_found or self._failed_checks >= FAILED_CHECKS_TO_LOSE:
                self._set(ReplicaState.DOWN, error, fits=False)
        finally:
            self.looked.set()

    async def _describe(self) -> None:
        # A replica that was away may have come back as another.
        is_due, self._checks = self._checks % CHECKS_BETWEEN_DESCRIPTIONS == 0, self._checks + 1
        if not self.is_up or is_due:
            description = await self._remote.describe(CHECK_TIMEOUT_S)
            if self.fits and self.description and self.description.identity != description.identity:
                # Even if the new process fits, it has none of the caches.
                self._lose(PeerUnavailable("another process answers in its place"), fits=False)
            await self._check_fit(self, description)
            self.fits = True
            self._remote.trust(description.identity)
            self.description = description

    async def _release_owed(self) -> None:
        if self._remote.owed_count:
            await self._remote.release()

    async def _try_release_owed(self) -> None:
        with suppress(PacelineError):  # they stay owed: one that works on a long pass frees nothing meanwhile
            await self._release_owed()

    def _lose(self, error: PacelineError, *, fits: bool) -> None:
        self._checks = 0
        self._set(ReplicaState.DOWN, error, fits=fits)
        self._look_soon.set()

    def _set(self, state: ReplicaState, error: PacelineError | None = None, *, fits: bool = True) -> None:
        """Set the state; `fits` False ends the fit, True leaves it as it was."""
        before, fitted = self.state, self.fits
        self.state, self.error, self.fits = state, error, fitted and fits
        if state is not before:
            self._log()
        if state is not before or self.fits is not fitted:
            self._on_change(self)

    def _log(self) -> None:
        state, error = self.state, self.error
        write = log.info if state in (ReplicaState.UP, ReplicaState.DRAINING) else log.warning
        model = self.description.model_id if self.description else None
        write(
            f"replica is {state.value}", address=self.address, model=model, **({"error": str(error)} if error else {})
        )


def models_up(replicas: Iterable[Replica[Any]]) -> list[ModelDescription]:
    """Return what the replicas that are up say of their models."""
    return [one.description for one in replicas if one.is_up and one.description]
