"""Settings of the draft service: `PACELINE_DRAFT_*` or flags."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.process.settings import MODEL, ModelServiceSettings
from paceline.types import Dtype, Quantization


class DraftSettings(ModelServiceSettings):
    """The draft service of Paceline: proposes tokens with a small model."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_DRAFT_")

    numerics: ClassVar[str] = "fast"
    """Fixed: a draft cannot affect output."""
    takes_steps: ClassVar[bool] = True
    model: str = Field(default="builtin:draft", description=MODEL)
    dtype: Dtype = Field(
        default="auto",
        description="type of the weights that are not int8, and of the cache; auto: on a CPU the faster one of float32 "
        "and bfloat16 for this model, as measured at load; on a GPU what the checkpoint's config.json says",
    )
    quantization: Literal["auto", Quantization] = Field(
        default="auto",
        description="int8: products have weights of int8 with a scale for each column, made at load, for plain "
        "decoders; w8a8: rows are rounded to int8 too, on x86 processors with AVX2 alone; none: weights are of "
        "--dtype; auto: on a CPU what is fastest of these, as measured at load; on a GPU none",
    )
