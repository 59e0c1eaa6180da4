"""Settings of the coordinator: `PACELINE_COORDINATOR_*` or flags."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from coordinator.door.limits import MAX_COMPLETIONS, MAX_REQUEST_BYTES
from coordinator.replicas.discovery import HostPort, parse_addresses
from paceline.checks import MAX_DRAFT_COUNT, MOST_LANES
from paceline.process.settings import Seconds, ServiceSettings
from paceline.process.variables import NO_DRAFT
from paceline.security.settings import Count, GrpcCount
from paceline.types import PAPER_POLICIES, PolicyName
from paceline.wire.ports import Listening


def _addresses(text: str) -> str:
    parse_addresses(text)
    return text


def _addresses_or_none(text: str) -> str:
    return text if text == NO_DRAFT else _addresses(text)


Addresses = Annotated[str, AfterValidator(_addresses)]


class CoordinatorSettings(ServiceSettings):
    """The coordinator of Paceline: the service that clients call."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_COORDINATOR_")

    draft: Annotated[str, AfterValidator(_addresses_or_none)] = Field(
        description="HOST:PORT of the draft service, or several with commas between them; a name may stand for several "
        "replicas, and is looked up again and again; none: there is no draft service, and none is missed"
    )
    target: Addresses = Field(description="HOST:PORT of the target service, or several, as for the draft")
    batch_size: Count = Field(
        default=8,
        description="most generations in a round; a target has --lanes times as many at once, and others wait in the "
        "queue",
    )
    draft_count: Annotated[int, Field(ge=0, le=MAX_DRAFT_COUNT)] | Literal["auto"] = Field(
        default=5,
        description="draft tokens that a generation gets in a round; 0: plain decoding; auto: as many as pay best by "
        "measured times, chosen anew as these change",
    )
    shared_suffixes: bool = Field(
        default=False,
        description="whether drafts for a request may be looked up in recent outputs of others; its client may then "
        "learn from the speed what others were answered; it needs the index of suffixes, which is compiled at "
        "installation",
    )
    prepared_rounds: bool = Field(
        default=True,
        description="whether draft services may go on after their answers, so that later rounds need not wait for "
        "them; they do where that is measured to pay; false: never, as for drafts whose work is paid for or shared",
    )
    policy: PolicyName = Field(
        default="continuous",
        description="how groups are formed; continuous: of whatever is ready; eqspec and exspec: by the algorithms of "
        "arXiv 2510.22876",
    )
    lanes: Annotated[int, Field(ge=1, le=MOST_LANES)] | None = Field(
        default=None,
        description="groups in flight at once; with 2 the draft works for one while the target verifies the other, "
        "more are for a target of that many stages (--pipeline-parallel), on which they follow each other; "
        "unset: 2, but 1 for few rows near the services, with --draft-count auto where 1 is measured to give more, and "
        "1 of twice the --batch-size while a near target works for other coordinators too: they fill each other's "
        "pauses; with eqspec and exspec 1, the most that they allow",
    )
    window: Count = Field(
        default=48,
        description="generations that exspec chooses groups from, which a target has at once; other policies have none",
    )
    max_new_tokens: Count = Field(default=256, description="limit on the output of a request that sets none itself")
    max_prompt_tokens: Count | None = Field(
        default=None,
        description="longest prompt; a request with a longer one is refused with INVALID_ARGUMENT; unset: as the model "
        "and its cache allow",
    )
    max_output_tokens: Count | None = Field(
        default=None,
        description="most output that a request may ask for; more is refused with INVALID_ARGUMENT; unset: as the "
        "model and its cache allow",
    )
    max_completions: Count = Field(
        default=MAX_COMPLETIONS,
        description="most outputs that one request may ask for; more are refused with INVALID_ARGUMENT",
    )
    max_message_bytes: GrpcCount = Field(
        default=MAX_REQUEST_BYTES,
        description="largest message, received or sent, of clients; a larger one ends its call with "
        "RESOURCE_EXHAUSTED; those of model services may have 16 MiB, or as much as this if that is more",
    )
    queue_limit: Count = Field(
        default=1024,
        description="most generations that wait for a place at a target; further requests are refused with "
        "RESOURCE_EXHAUSTED and a time to try again",
    )
    processes: Count = Field(
        default=1,
        description="processes behind the port, each a coordinator of its own with its own queue and limits; a process "
        "drives about a core; connections are spread among them, and one that ends is started again; each serves its "
        "metrics on a port of its own, from --metrics-port on",
    )
    process_index: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="which of --processes this one is; set by the one that starts them, which is none itself",
    )
    startup_timeout_s: Seconds = Field(
        default=120,
        description="time to wait for the first target service at start; then the coordinator ends with status 1",
    )
    target_wait_s: Seconds = Field(
        default=60,
        description="time that a request waits while no target service is there; then it ends with UNAVAILABLE, and "
        "clients try again",
    )
    call_timeout_s: Seconds = Field(
        default=120,
        description="time that a call to a model service may take; then that replica is not asked until it works again",
    )

    models_ca: Path | None = Field(
        default=None,
        description="PEM file of the CA of the model services' certificates: they are called over TLS, and shown "
        "--tls-certificate; read again when it changes; unset: they are called in plaintext",
    )
    token_file: Path | None = Field(
        default=None,
        description="file of tokens, one a line, of which clients must show one; read again when it changes; unset: "
        "none is needed",
    )

    @property
    def draft_addresses(self) -> list[HostPort]:
        """Addresses of the draft service; empty when there is to be none."""
        return [] if self.draft == NO_DRAFT else parse_addresses(self.draft)

    @property
    def listens(self) -> tuple[Listening, ...]:
        """As of every service; a port that is shared with other processes is not asked for alone."""
        if self.process_index is not None:
            return self._asked_for(("--metrics-port", self.metrics_host, self.metrics_port))
        ports = [self.metrics_port + index for index in range(1, self.processes)] if self.metrics_port else []
        more = self._asked_for(*(("--metrics-port", self.metrics_host, port) for port in ports))
        return (*super().listens, *more)

    @property
    def lane_count(self) -> int:
        return self.lanes or (1 if self.policy in PAPER_POLICIES else 2)

    @model_validator(mode="after")
    def _paper_policies_have_one_lane(self) -> Self:
        if self.policy in PAPER_POLICIES and self.lane_count > 1:
            raise ValueError(f"--policy {self.policy} runs one group at a time; leave --lanes out or give 1")
        return self
