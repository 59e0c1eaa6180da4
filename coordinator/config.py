"""Settings of the coordinator: `PACELINE_COORDINATOR_*` or flags."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from coordinator.door.limits import MAX_COMPLETIONS, MAX_REQUEST_BYTES
from coordinator.replicas.discovery import parse_addresses
from paceline.checks import MAX_DRAFT_COUNT
from paceline.process.settings import Seconds, ServiceSettings
from paceline.security.settings import Count
from paceline.types import PAPER_POLICIES, PolicyName


def _addresses(text: str) -> str:
    parse_addresses(text)
    return text


Addresses = Annotated[str, AfterValidator(_addresses)]


class CoordinatorSettings(ServiceSettings):
    """The coordinator of Paceline: the service that clients call."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_COORDINATOR_")

    draft: Addresses = Field(
        description="HOST:PORT of the draft service, or several separated by commas; a name may lead to several"
    )
    target: Addresses = Field(description="HOST:PORT of the target service, or several, as for the draft")
    batch_size: Count = Field(default=8, description="most generations in a round")
    draft_count: Annotated[int, Field(ge=0, le=MAX_DRAFT_COUNT)] | Literal["auto"] = Field(
        default=5, description="draft tokens a round and generation; auto: what pays best by measured times"
    )
    policy: PolicyName = Field(
        default="continuous", description="how groups are formed; eqspec and exspec are the paper's"
    )
    lanes: Annotated[int, Field(ge=1, le=2)] | None = Field(
        default=None, description="groups in flight at once; unset: 2, and 1 under the paper's policies"
    )
    window: Count = Field(default=48, description="generations that exspec chooses among")
    max_new_tokens: Count = Field(default=256, description="output limit of requests that set none")
    max_prompt_tokens: Count | None = Field(
        default=None, description="most tokens of a prompt; unset: as the model allows"
    )
    max_output_tokens: Count | None = Field(
        default=None, description="most tokens that a request may ask for; unset: as the model allows"
    )
    max_completions: Count = Field(default=MAX_COMPLETIONS, description="most outputs that a request may ask for")
    max_message_bytes: Count = Field(default=MAX_REQUEST_BYTES, description="largest message, either way")
    queue_limit: Count = Field(default=1024, description="most generations waiting for a place")
    startup_timeout_s: Seconds = Field(default=120, description="seconds to wait for a target service at start")
    target_wait_s: Seconds = Field(
        default=60, description="seconds that requests wait for a target service while none is there"
    )
    call_timeout_s: Seconds = Field(default=120, description="seconds that one call to a target service may take")

    models_ca: Path | None = Field(
        default=None,
        description="PEM CA of the model services' certificates; its own certificate is shown to them; reloaded",
    )
    token_file: Path | None = Field(
        default=None, description="file of the tokens that clients must show, one a line; reloaded; unset: none needed"
    )

    @property
    def lane_count(self) -> int:
        return self.lanes or (1 if self.policy in PAPER_POLICIES else 2)

    @model_validator(mode="after")
    def _paper_policies_have_one_lane(self) -> Self:
        if self.policy in PAPER_POLICIES and self.lane_count > 1:
            raise ValueError(f"--policy {self.policy} runs one group at a time; leave --lanes out or give 1")
        return self
