"""A loaded model: its decoder, its description and its tokenizer."""

from dataclasses import dataclass
from functools import partial

from paceline.engine.backend import Backend
from paceline.engine.interfaces import KvShape
from paceline.engine.model.decoder import Decoder
from paceline.engine.ranks.group import Group
from paceline.engine.ranks.slots import LedSlots
from paceline.engine.slots import KvSlots, SlotsMaker
from paceline.planning.dimensions import ModelDimensions
from paceline.types import ModelDescription, TokenizerFiles


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    description: ModelDescription
    dimensions: ModelDimensions | None
    """None for an architecture whose configuration has no such sizes."""
    kv_shape: KvShape
    backend: Backend
    tokenizer: TokenizerFiles | None
    mixes_experts: bool
    """Whether a token of a pass shares products with the other tokens that its expert is given."""
    layer_parameter_count: int
    """Parameters of a layer on average, of which this process holds them, with embedding and head shared out."""
    group: Group | None = None
    """The ranks that hold the model together; decoder and shape are then this rank's. None: it is held here alone."""

    @property
    def lay_out(self) -> SlotsMaker:
        """Lays out the slots of a pool, on each rank there is."""
        return partial(LedSlots, self.group) if self.group else KvSlots
