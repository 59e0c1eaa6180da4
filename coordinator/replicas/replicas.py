"""All replicas of one model service. Owns the list: who joins and who leaves. Each `Replica` owns its own state."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from coordinator.background import Background
from coordinator.protocols import Remote
from coordinator.replicas.discovery import HostPort, resolve
from coordinator.replicas.replica import Replica
from paceline.types import ModelDescription, ReplicaState

log = structlog.get_logger()

RESOLVE_INTERVAL_S = 3.0

RemoteT = TypeVar("RemoteT", bound=Remote)
UsedT_contra = TypeVar("UsedT_contra", bound=Remote, contravariant=True)


class ReplicaUser(Protocol[UsedT_contra]):
    """The user of the replicas, told of their changes."""

    def changed(self, replica: Replica[UsedT_contra]) -> None:
        """Take note of a replica that is new or whose state changed."""
        ...

    def left(self, replica: Replica[UsedT_contra]) -> None:
        """Forget a replica that is gone for good: no name leads to it, and it does not answer, or as another."""
        ...


class Replicas(Generic[RemoteT]):
    def __init__(
        self,
        addresses: Sequence[HostPort],
        connect: Callable[[str, HostPort], RemoteT],
        check_fit: Callable[[Replica[RemoteT], ModelDescription], Awaitable[None]],
        user: ReplicaUser[RemoteT],
        tasks: Background,
        resolve: Callable[[HostPort], Awaitable[set[str]]] = resolve,
    ) -> None:
        """`connect` opens a connection to an `IP:PORT` that a HOST:PORT resolved to."""
        self._connect = connect
        self._check_fit = check_fit
        self._user = user
        self._tasks = tasks
        self._resolve = resolve
        self._found: dict[HostPort, set[str]] = {address: set() for address in addresses}
        self._unresolved: set[HostPort] = set()
        self._replicas: dict[str, Replica[RemoteT]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def all(self) -> list[Replica[RemoteT]]:
        return list(self._replicas.values())

    @property
    def up(self) -> list[Replica[RemoteT]]:
        return [replica for replica in self._replicas.values() if replica.is_up]

    async def run(self) -> None:
        """Resolve the names again and again until cancelled."""
        while True:
            await asyncio.sleep(RESOLVE_INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Resolve the names once. A name that cannot be resolved keeps its last addresses."""
        for address in self._found:
            try:
                self._found[address] = await self._resolve(address)
                self._unresolved.discard(address)
            except OSError as error:
                if address not in self._unresolved:
                    log.warning("a name cannot be resolved", address=str(address), error=str(error))
                self._unresolved.add(address)
        named = {place: address for address, places in self._found.items() for place in places}
        for place in sorted(named.keys() - self._replicas.keys()):
            replica = Replica(place, self._connect(place, named[place]), self._check_fit, self._on_change)
            self._replicas[place] = replica
            self._user.changed(replica)
            self._watches[place] = self._tasks.start(self._watch(replica))
        for place, replica in list(self._replicas.items()):
            replica.set_named(place in named)
            # What is refused where no name leads may be anybody who got the address, and live for ever.
            if place not in named and replica.state in (ReplicaState.DOWN, ReplicaState.REFUSED):
                del self._replicas[place]
                self._watches.pop(place).cancel()
                self._user.left(replica)

    async def _watch(self, replica: Replica[RemoteT]) -> None:
        try:
            await replica.watch()
        finally:
            await replica.remote.close()

    def _on_change(self, replica: Replica[RemoteT]) -> None:
        self._user.changed(replica)
        for other in self._replicas.values():
            if other is not replica and other.state is ReplicaState.REFUSED:
                other.look_soon()  # the replica it had to match may be gone
        self._changed.set()

    async def wait_until_up(self) -> None:
        """Wait until a replica is up. Raise IncompatiblePair when one is refused."""
        self._raise_refusal()
        while not self.up:
            self._changed.clear()
            await self._changed.wait()
            self._raise_refusal()

    async def looked(self) -> None:
        """Wait until each replica known now was looked at once. Raise IncompatiblePair when one is refused."""
        await asyncio.gather(*(replica.looked.wait() for replica in self.all))
        self._raise_refusal()

    def _raise_refusal(self) -> None:
        for replica in self.all:
            if replica.state is ReplicaState.REFUSED and replica.error:
                raise replica.error
