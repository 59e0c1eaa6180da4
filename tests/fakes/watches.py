"""A watch of the machine with scripted findings."""

from paceline.measure.contention import Contention, Moment


class FakeWatch:
    """Reports runs as disturbed in the given order, and later runs as quiet."""

    def __init__(self, *others_shares: float) -> None:
        self._others_shares = list(others_shares)
        self.watched_count = 0

    def begin(self) -> Moment:
        return Moment(0, 0, 0, 0)

    def since(self, began: Moment) -> Contention:
        self.watched_count += 1
        return Contention(self._others_shares.pop(0) if self._others_shares else 0.0, 1.0)
