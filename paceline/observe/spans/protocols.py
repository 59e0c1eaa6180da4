"""How spans are sent, as OpenTelemetry's standard variables say."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from paceline.errors import StartupError

OtlpProtocol = Literal["grpc", "http/protobuf"]
Compression = Literal["none", "gzip", "deflate"]
PROTOCOLS: dict[str, OtlpProtocol] = {"grpc": "grpc", "http/protobuf": "http/protobuf"}
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
COMPRESSIONS: dict[str, Compression] = {"none": "none", "gzip": "gzip", "deflate": "deflate"}
COMPRESSION_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION")
Word = TypeVar("Word", bound=str)


def otlp_protocol(environment: Mapping[str, str]) -> OtlpProtocol | None:
    """Return the protocol by which spans are sent; None when they are not. Raise StartupError for a wrong variable."""
    names = [name.strip() for name in environment.get("OTEL_TRACES_EXPORTER", "none").split(",") if name.strip()]
    for name in names:
        if name not in ("otlp", "none"):
            raise StartupError(f"OTEL_TRACES_EXPORTER is {name!r}; give otlp or none, and --trace-file for a file")
    if "otlp" not in names:
        return None
    return _first_set(environment, PROTOCOL_VARIABLES, PROTOCOLS, "grpc")


def otlp_compression(environment: Mapping[str, str]) -> Compression:
    """Return how what is sent is compressed. Raise StartupError for a wrong variable.

    The SDK's exporters differ in the values that they know, and one of them does not know `none`.
    """
    return _first_set(environment, COMPRESSION_VARIABLES, COMPRESSIONS, "none")


def _first_set(
    environment: Mapping[str, str], variables: Sequence[str], values: Mapping[str, Word], default: Word
) -> Word:
    """Return the value of the first variable that is set. Raise StartupError for one that is none of the values."""
    for variable in variables:
        # By the specification, a variable that is empty is not set, and a value's case is of no matter.
        if asked := environment.get(variable, "").strip().lower():
            if asked not in values:
                raise StartupError(f"{variable} is {asked!r}; give {' or '.join(values)}")
            return values[asked]
    return default
