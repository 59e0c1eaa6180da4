"""Settings of every service for admission, encryption and the limits on what a caller may send."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from paceline.security.limits import MAX_CONCURRENT_STREAMS, MAX_MESSAGE_BYTES

Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]


class SecuritySettings(BaseSettings):
    tls_certificate: Path | None = Field(
        default=None, description="PEM certificate chain to serve with, and to show to other services; reloaded"
    )
    tls_key: Path | None = Field(default=None, description="PEM key of the certificate; reloaded")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM CA; callers must show a certificate that it vouches for; reloaded"
    )
    tls_allowed_names: str = Field(
        default="", description="names, with commas between them; a caller's certificate must bear one of them"
    )
    plaintext: bool = Field(
        default=False, description="let plaintext go beyond loopback, where the network itself keeps strangers out"
    )
    health_port: Port | None = Field(
        default=None, description="plaintext port with health checks and nothing else, for probes; unset: none"
    )
    reflection: bool = Field(default=True, description="tell callers what methods there are")
    describe: bool = Field(default=True, description="tell callers what model is served and how busy it is")
    max_message_bytes: Count = Field(default=MAX_MESSAGE_BYTES, description="largest message, either way")
    max_concurrent_streams: Count = Field(
        default=MAX_CONCURRENT_STREAMS, description="most calls at once on one connection"
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
