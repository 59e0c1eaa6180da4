"""A loaded model: the way a pass goes through them, and what it says of itself."""

from dataclasses import dataclass

from paceline.engine.decoder import Decoder
from paceline.engine.kv_cache import KvShape
from paceline.types import ModelDescription, TokenizerFiles


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    description: ModelDescription
    kv_shape: KvShape
    tokenizer: TokenizerFiles | None
