"""The default policy: any ready generations. Ragged rows need no equal lengths, so nothing else matters."""

from collections.abc import Sequence

from coordinator.requests.generation import Generation
from coordinator.rounds.policies.policy import Selection


class Continuous:
    """Any ready generations, least recently served first, so that none can starve; finished slots are refilled at once.

    Two lanes have twice the batch live: while one group is verified, drafts are proposed for the other.
    """

    def live_limit(self, batch_size: int, lanes: int) -> int:
        return batch_size * lanes

    def select(self, window: Sequence[Generation], batch_size: int) -> Selection:
        return Selection(list(window[:batch_size]))
