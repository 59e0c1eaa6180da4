"""How spans are sent, as OpenTelemetry's standard variables say."""

from collections.abc import Mapping
from typing import Literal

from paceline.errors import StartupError

OtlpProtocol = Literal["grpc", "http/protobuf"]
PROTOCOLS: dict[str, OtlpProtocol] = {"grpc": "grpc", "http/protobuf": "http/protobuf"}
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
"""The first that is set counts."""


def otlp_protocol(environment: Mapping[str, str]) -> OtlpProtocol | None:
    """Return the protocol by which spans are sent; None when they are not. Raise StartupError for a wrong variable."""
    names = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "none").split(",") if name.strip()]
    for name in names:
        if name not in ("otlp", "none"):
            raise StartupError(f"OTEL_TRACES_EXPORTER is {name!r}; give otlp or none, and --trace-file for a file")
    if "otlp" not in names:
        return None
    for variable in PROTOCOL_VARIABLES:
        # By the specification, a variable that is empty is not set.
        if asked := environment.get(variable, "").strip():
            if asked not in PROTOCOLS:
                raise StartupError(f"{variable} is {asked!r}; give {' or '.join(PROTOCOLS)}")
            return PROTOCOLS[asked]
    return "grpc"
