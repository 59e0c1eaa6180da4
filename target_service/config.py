"""Settings of the target service: `PACELINE_TARGET_*` or flags."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.settings import ModelServiceSettings


class TargetSettings(ModelServiceSettings):
    """The target service of Paceline: proposes tokens with a small model."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_TARGET_")

    model: str = Field(default="builtin:target", description="checkpoint directory, or builtin:target")
