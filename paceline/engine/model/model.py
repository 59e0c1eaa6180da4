"""A loaded model: the way a pass goes through them, and what it says of itself."""

from dataclasses import dataclass

from paceline.engine.interfaces import KvShape
from paceline.engine.model.decoder import Decoder
from paceline.types import ModelDescription, TokenizerFiles


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    description: ModelDescription
    kv_shape: KvShape
    tokenizer: TokenizerFiles | None
    mixes_experts: bool
    """Whether tokens of a pass share products with whatever other tokens the same expert is given."""

    @property
    def layer_parameter_count(self) -> int:
        """On average, embedding and head shared out."""
        return self.description.parameter_count // self.kv_shape.layer_count
