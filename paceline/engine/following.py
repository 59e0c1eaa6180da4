"""The work of a rank after the first: it does what it is told, in the order it is told, and decides nothing."""

from paceline.engine.attention.strict import StrictAttention
from paceline.engine.budget import budget_of
from paceline.engine.memory import refusing_to_start
from paceline.engine.model.model import LoadedModel
from paceline.engine.model.ranked_decoder import RankedDecoder
from paceline.engine.options import EngineOptions
from paceline.engine.passes import threads_of
from paceline.engine.ranks.messages import Beat, End, LayOut, RunPass
from paceline.engine.slots import KvSlots
from paceline.engine.threads import at_most


class Follower:
    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        """`model` is a rank's share. Raise StartupError when its memory does not hold it."""
        assert model.group and isinstance(model.decoder, RankedDecoder)
        self._model = model
        self._group, self._decoder = model.group, model.decoder
        self._budget = budget_of(model, options)
        self._slots: KvSlots | None = None

    def run(self) -> None:
        """Follow the first rank until it ends the group. Raise RuntimeError when it is gone, or silent for long."""
        while not isinstance(told := self._group.told(), End):
            match told:
                case Beat():
                    self._group.least(0)
                case LayOut():
                    self._slots = self._laid_out(told)
                case RunPass():
                    assert self._slots
                    with at_most(told.most_threads), threads_of(self._model, len(told.token_ids)):
                        self._decoder.follow(told, self._slots)
        self._group.close()

    def _laid_out(self, told: LayOut) -> KvSlots:
        """Lay out slots of this rank's heads and layers, for as many pages as all ranks have room for."""
        self._slots = None
        shape = self._model.kv_shape
        own_count = self._budget.kv_bytes // (told.page_tokens * shape.token_bytes)
        page_count = self._group.least(min(told.page_count, max(0, own_count)))
        attention = StrictAttention if told.is_strict else self._model.backend.attention
        with refusing_to_start(f"{self._budget.setting} is more than can be had by rank {self._group.place.rank}"):
            return KvSlots(shape, page_count, told.page_tokens, attention)
