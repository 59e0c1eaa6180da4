"""Settings of the coordinator: `PACELINE_COORDINATOR_*` or flags."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from paceline.settings import Count, Seconds, ServiceSettings


class CoordinatorSettings(ServiceSettings):
    """The coordinator of Paceline: the service that clients call."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_COORDINATOR_")

    draft: str = Field(description="HOST:PORT of the draft service")
    target: str = Field(description="HOST:PORT of the target service")
    batch_size: Count = Field(default=8, description="most sequences in a round")
    draft_count: Annotated[int, Field(ge=0, le=64)] = Field(default=5, description="draft tokens a round and sequence")
    max_new_tokens: Count = Field(default=256, description="output limit of requests that set none")
    queue_limit: Count = Field(default=1024, description="most requests waiting for a place in the pool")
    startup_timeout_s: Seconds = Field(default=120, description="seconds to wait for the two model services at start")
    call_timeout_s: Seconds = Field(default=120, description="seconds that one call to a model service may take")
