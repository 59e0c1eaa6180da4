"""An event loop whose time passes only when nothing can run, and then at once."""

import asyncio
import selectors


class _TimeLeaper(selectors.SelectSelector):
    """Waits for nothing: where the loop would sleep, the time is later."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits, and nothing is planned: the simulation is stuck"
            self.now_s += timeout
        return ready


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaper = _TimeLeaper()
        super().__init__(self._leaper)

    def time(self) -> float:
        return self._leaper.now_s
