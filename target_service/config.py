"""Settings of the target service: `PACELINE_TARGET_*` or flags."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.process.settings import ModelServiceSettings
from paceline.security.settings import Count


class TargetSettings(ModelServiceSettings):
    """The target service of Paceline: verifies draft tokens with the model whose output is wanted."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_TARGET_")

    model: str = Field(default="builtin:target", description="checkpoint directory, hub id, or builtin:target")
    threads_beside_draft: Count | None = Field(
        default=None,
        description="threads for calls that verify draft tokens, where the draft service has other cores of the same "
        "machine; with strict numerics for all calls; unset: as --threads",
    )
    numerics: Literal["auto", "fast", "strict"] = Field(
        default="auto",
        description="strict: no result depends on what is computed beside it, so speculative output equals plain "
        "decoding bit for bit; slower. fast gives that up in half precision. auto: strict in bfloat16 and float16; "
        "fast in float32, whose output equals Hugging Face's. No GPU has been seen yet",
    )
