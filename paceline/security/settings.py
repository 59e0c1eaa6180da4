"""Settings of every service for admission, encryption and the limits on what a caller may send."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from paceline.security.limits import (
    LEAST_MESSAGE_BYTES,
    MAX_CHANNEL_ARGUMENT,
    MAX_CONCURRENT_STREAMS,
    MAX_MESSAGE_BYTES,
)

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
GrpcCount = Annotated[int, Field(ge=1, le=MAX_CHANNEL_ARGUMENT)]


class SecuritySettings(BaseSettings):
    tls_certificate: Path | None = Field(
        default=None,
        description="PEM file of the certificate chain to serve with; a coordinator shows it to model services too; "
        "read again when it changes; unset: no TLS",
    )
    tls_key: Path | None = Field(
        default=None, description="PEM file of the certificate's key, without a password; read again when it changes"
    )
    tls_client_ca: Path | None = Field(
        default=None,
        description="PEM file of a CA: callers must show a certificate that it issued; read again when it changes; "
        "unset: callers show none",
    )
    tls_allowed_names: str = Field(
        default="",
        description="names with commas between them: of the callers with a certificate only those may call whose "
        "certificate has one of them as a DNS name, IP or URI, or as common name if it has no such; unset: all may",
    )
    plaintext: bool = Field(
        default=False,
        description="true: listen and call in plaintext beyond this machine, where the network itself keeps strangers "
        "out; false: addresses other than loopback need TLS",
    )
    health_port: Port | None = Field(
        default=None,
        description="additional port with health checks alone, always in plaintext, for probes without TLS; 0 takes "
        "any free one; unset: none",
    )
    reflection: bool = Field(
        default=True, description="tell callers what methods there are, by gRPC's server reflection"
    )
    describe: bool = Field(
        default=True,
        description="tell callers what model is served and how busy it is; false at the coordinator shuts out the "
        "commands of paceline, which ask for it; false at a model service needs --tls-allowed-names, since its "
        "coordinator must be told",
    )
    max_message_bytes: Annotated[int, Field(ge=LEAST_MESSAGE_BYTES, le=MAX_CHANNEL_ARGUMENT)] = Field(
        default=MAX_MESSAGE_BYTES,
        description="largest message, received or sent; a larger one ends its call with RESOURCE_EXHAUSTED",
    )
    max_concurrent_streams: GrpcCount = Field(
        default=MAX_CONCURRENT_STREAMS,
        description="most calls at once on one connection; further ones wait at the caller",
    )

    @property
    def allowed_names(self) -> frozenset[str]:
        return frozenset(name.strip() for name in self.tls_allowed_names.split(",") if name.strip())

    @model_validator(mode="after")
    def _parts_come_together(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together; give both or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("--tls-client-ca needs TLS; give --tls-certificate and --tls-key too")
        if self.tls_allowed_names and not self.tls_client_ca:
            raise ValueError("--tls-allowed-names needs certificates that can be trusted; give --tls-client-ca too")
        if self.tls_allowed_names and not self.allowed_names:
            raise ValueError("--tls-allowed-names holds no name, and so would let nobody in")
        return self
