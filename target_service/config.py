"""Settings of the target service: `PACELINE_TARGET_*` or flags."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.process.settings import MODEL, QUANTIZATION, ModelServiceSettings
from paceline.process.variables import NO_HEADS
from paceline.security.settings import Count
from paceline.types import Numerics, Quantization


class TargetSettings(ModelServiceSettings):
    """The target service of Paceline: verifies draft tokens with the model whose output is wanted."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_TARGET_")

    model: str = Field(default="builtin:target", description=MODEL)
    quantization: Quantization = Field(default="none", description=QUANTIZATION)
    heads: str = Field(
        default="none",
        description="folder of heads that draft inside the service, from what the model computes anyway; "
        "builtin:clover or builtin:eagle for builtin:target; none: there are no heads",
    )
    threads_beside_draft: Count | None = Field(
        default=None,
        description="CPU threads, in each process of a model over several, for calls with draft tokens to verify and "
        "no long prompt, where a draft service uses other cores of the same machine; where strict numerics need calls "
        "of one shape, for all calls; no more than --threads are used; unset: as --threads",
    )
    numerics: Numerics = Field(
        default="auto",
        description="strict: no result depends on what is computed beside it, so speculative output equals plain "
        "decoding bit for bit; slower. fast: the fastest way; in half precision output may then differ from plain "
        "decoding. auto: strict in bfloat16, float16 and with w8a8; else fast, where float32 output equals Hugging "
        "Face's",
    )

    @model_validator(mode="after")
    def _heads_are_on_one_device(self) -> Self:
        if self.heads != NO_HEADS and self.grid.rank_count > 1:
            raise ValueError(
                f"--heads {self.heads} cannot be had of a model over {self.grid.rank_count} processes; give --heads "
                "none, or --tensor-parallel 1 and --pipeline-parallel 1"
            )
        return self
