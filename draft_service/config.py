"""Settings of the draft service: `PACELINE_DRAFT_*` or flags."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.process.settings import MODEL, ModelServiceSettings


class DraftSettings(ModelServiceSettings):
    """The draft service of Paceline: proposes tokens with a small model."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_DRAFT_")

    numerics: ClassVar[str] = "fast"
    """Fixed: a draft cannot affect output."""
    takes_steps: ClassVar[bool] = True
    model: str = Field(default="builtin:draft", description=MODEL)
