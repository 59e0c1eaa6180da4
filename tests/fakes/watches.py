"""A watch of the machine that finds what it is told."""

from paceline.measure.contention import Contention, Moment


class FakeWatch:
    """Finds one run after the other as disturbed as told, and those after the last quiet."""

    def __init__(self, *others_shares: float) -> None:
        self._others_shares = list(others_shares)
        self.watched_count = 0

    def begin(self) -> Moment:
        return Moment(0, 0, 0, 0)

    def since(self, began: Moment) -> Contention:
        self.watched_count += 1
        return Contention(self._others_shares.pop(0) if self._others_shares else 0.0, 1.0)
