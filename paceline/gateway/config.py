"""Settings of the gateway: `PACELINE_GATEWAY_*` or flags."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from paceline.gateway.tool_calls import ToolFormat
from paceline.process.settings import ProcessSettings, Seconds
from paceline.retries import RetryPolicy
from paceline.security.channels import ChannelSecurity, channel_security
from paceline.security.settings import Count, Port


class GatewaySettings(ProcessSettings):
    """The gateway of Paceline: OpenAI's HTTP, for clients that speak no gRPC."""

    model_config = SettingsConfigDict(env_prefix="PACELINE_GATEWAY_")

    coordinator: Annotated[str, Field(min_length=1)] = Field(
        description="HOST:PORT of a coordinator, or several with commas between them; one is used until it fails or is "
        "full, then the next"
    )
    port: Port = Field(default=8000, description="port to listen on; 0 takes any free one, which the service prints")
    coordinator_ca: Path | None = Field(
        default=None, description="PEM CA of the coordinators' certificates: they are called over TLS; unset: plaintext"
    )
    coordinator_certificate: Path | None = Field(
        default=None, description="PEM certificate to show to the coordinators; unset: none"
    )
    coordinator_key: Path | None = Field(default=None, description="PEM key of that certificate")
    coordinator_authority: str | None = Field(
        default=None, description="name in the coordinators' certificates, where it is not the one of the address"
    )
    coordinator_token_file: Path | None = Field(
        default=None, description="file with the token to show to the coordinators; read again when it changes"
    )
    token_file: Path | None = Field(
        default=None,
        description="file of tokens, one a line, of which clients must show one as `Authorization: Bearer`; read again "
        "when it changes; only /health, /health/live and the page are open then; unset: none is needed",
    )
    tls_certificate: Path | None = Field(
        default=None, description="PEM file of the certificate chain to serve with; read again when it changes"
    )
    tls_key: Path | None = Field(default=None, description="PEM file of the certificate's key, without a password")
    plaintext: bool = Field(
        default=False,
        description="true: listen and call in plaintext beyond this machine, where the network itself keeps strangers "
        "out; false: addresses other than loopback need TLS",
    )
    served_model_name: str = Field(
        default="",
        description="names, with commas between them, that requests may give the model; the first is shown; unset: the "
        "target's own name",
    )
    tool_format: ToolFormat = Field(
        default="hermes",
        description="form in which the model writes calls of tools; hermes: JSON between <tool_call> tags, as Qwen and "
        "most others; llama3-json: JSON alone",
    )
    max_body_bytes: Count = Field(
        default=8 << 20,
        description="largest body of a request; a larger one is refused. All that are in work have 64MiB together, or "
        "as much as one, if that is more",
    )
    max_requests: Count = Field(
        default=1000, description="most requests for outputs at once; further ones are refused with status 429"
    )
    request_timeout_s: Seconds = Field(
        default=600, description="time that an answer may take; then it ends with status 504, or with an error event"
    )
    retry_for_s: Seconds = Field(
        default=20,
        description="time to go on trying while no coordinator can be reached, anew after each piece of output",
    )
    cors_origin: str = Field(
        default="",
        description="origins, with commas between them, whose pages may call; *: every page; unset: the gateway's own",
    )

    @model_validator(mode="after")
    def _parts_come_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together; give both or neither")
        return self

    @property
    def model_names(self) -> tuple[str, ...]:
        return _words(self.served_model_name)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        return _words(self.cors_origin)

    @property
    def retries(self) -> RetryPolicy:
        # A client that may try again later is told so, instead of waiting here.
        return RetryPolicy(self.retry_for_s, wait_while_full=False)

    def coordinator_security(self) -> ChannelSecurity:
        """Return how coordinators are called. Raise StartupError when a file is wrong or a part is missing."""
        return channel_security(
            ca=self.coordinator_ca,
            certificate=self.coordinator_certificate,
            key=self.coordinator_key,
            token_file=self.coordinator_token_file,
            plaintext=self.plaintext,
            authority=self.coordinator_authority,
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for one in text.split(",") if (word := one.strip()))
