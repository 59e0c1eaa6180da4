"""A loaded model: its decoder, its description and its tokenizer."""

from dataclasses import dataclass

from paceline.engine.backend import Backend
from paceline.engine.interfaces import KvShape
from paceline.engine.model.decoder import Decoder
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

    @property
    def layer_parameter_count(self) -> int:
        """Parameters of a layer on average, with embedding and head shared out."""
        return self.description.parameter_count // self.kv_shape.layer_count
