"""The ranks of a model as one of them sees them: what the first tells the others, and what they work out together.

It owns the order in which ranks talk. It knows nothing of models.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from paceline.engine.ranks.links import Awaited, Links
from paceline.engine.ranks.messages import Beat, Message, from_numbers, to_numbers
from paceline.errors import StartupError
from paceline.types import RankPlace

ROOM = 1024
"""Numbers of a message that come with its length; what is longer follows."""
HOST = torch.device("cpu")


class Group:
    def __init__(self, place: RankPlace, links: Links, device: torch.device) -> None:
        """`device` is where the model's tensors are."""
        self.place = place
        self._links = links
        self.device = device
        self._others = range(1, place.grid.rank_count)
        self._is_lost = False
        self.while_waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while the first rank waits for other stages, which may begin another pass meanwhile."""
        self.sharing_count = 1
        """Ranks whose tensors take the same memory as this one's, itself included; see `share_memory`."""

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Do together what all ranks must do: when it fails inside, the group is lost for good."""
        self.check()
        try:
            yield
        except BaseException:
            self._is_lost = True
            raise

    def check(self) -> None:
        """Raise RuntimeError when the group is lost."""
        if self._is_lost:
            raise RuntimeError("a rank of this model is gone, hangs, or takes a pass longer than --rank-timeout-s")

    def meet(self) -> None:
        """Wait until all ranks have loaded as far as this one, which may take minutes. All ranks call it."""
        self._links.meet()

    def close(self) -> None:
        self._links.close()

    def tell(self, message: Message) -> None:
        """Tell all other ranks, as the first one."""
        numbers = torch.tensor([0, *to_numbers(message)])
        numbers[0] = len(numbers)
        first = torch.zeros(ROOM, dtype=torch.int64)
        first[: len(numbers)] = numbers[:ROOM]
        for rank in self._others:
            self._links.send(first, rank)
            if len(numbers) > ROOM:
                self._links.send(numbers[ROOM:], rank)

    def told(self) -> Message:
        """Wait for what the first rank tells."""
        numbers: list[int] = self._links.expect((ROOM,), torch.int64, HOST, 0)().tolist()
        count = numbers[0]
        if count > ROOM:
            numbers += self._links.expect((count - ROOM,), torch.int64, HOST, 0)().tolist()
        return from_numbers(numbers[1:count])

    def beat(self) -> None:
        """Raise unless all ranks answer in time. As the first rank."""
        with self.in_step():
            self.tell(Beat())
            self.least(0)

    def least(self, number: int) -> int:
        """Return the least number that any rank gives. All ranks call it."""
        return min(self._numbers(number))

    def share_memory(self, memory: str) -> None:
        """Count the ranks that name the same memory as this one. All ranks call it."""
        own = _number(memory)
        self.sharing_count = self._numbers(own).count(own)

    def _numbers(self, own: int) -> list[int]:
        """Return the numbers that all ranks give, the first one's first."""
        if self.place.rank:
            self._links.send(torch.tensor([own], dtype=torch.int64), 0)
            numbers: list[int] = self._links.expect((self.place.grid.rank_count,), torch.int64, HOST, 0)().tolist()
            return numbers
        given = torch.tensor([own, *(int(self._links.expect((1,), torch.int64, HOST, one)()) for one in self._others)])
        for rank in self._others:
            self._links.send(given, rank)
        return [int(one) for one in given]

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Raise StartupError, in the rank that differs, unless all ranks say the same. All ranks call it."""
        own = torch.tensor([_number(text) for text in facts.values()])
        if not self.place.rank:
            for rank in self._others:
                self._links.send(own, rank)
            return
        firsts = self._links.expect((len(facts),), torch.int64, HOST, 0)()
        if different := [name for name, is_same in zip(facts, (own == firsts).tolist(), strict=True) if not is_same]:
            raise StartupError(
                f"rank {self.place.rank} differs from rank 0 in its {', '.join(different)}; start all ranks of a model "
                "with the same settings, files and versions, and on machines of one kind where numerics are strict or "
                "experts are mixed"
            )

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks of this stage give, which they add in one order whatever its shape is."""
        total, *others = self._links.gather(part)
        for one in others:
            total += one
        return total

    def joined(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return the parts [T, width] of this stage's ranks side by side, in its first rank; elsewhere the own part."""
        first = self.place.rank - self.place.share
        if not part.numel():
            return part.new_empty((0, sum(widths)))
        if self.place.share:
            self._links.send(part, first)
            return part
        expected = [self._expect((len(part), width), first + share) for share, width in enumerate(widths) if share]
        return torch.cat([part, *(awaited() for awaited in expected)], dim=1)

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Send [T, H] to the next stage; the last one sends it to the first."""
        if hidden.numel():
            self._links.send(hidden, self.place.next_rank)

    def expect_passed(self, token_count: int, hidden_size: int) -> Awaited:
        """Begin to receive [T, H] from the stage before."""
        if not token_count:
            return lambda: torch.empty((0, hidden_size), device=self.device)
        return self._expect((token_count, hidden_size), self.place.previous_rank)

    def _expect(self, shape: Sequence[int], rank: int) -> Awaited:
        return self._links.expect(shape, torch.float32, self.device, rank)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
