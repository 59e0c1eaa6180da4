"""Settings of the services: flags, environment variables and their checks. Knows nothing of the settings' meaning.

A field `kv_memory` of the target service is the flag `--kv-memory` and the variable `PACELINE_TARGET_KV_MEMORY`. Flags
win over variables.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import CliSettingsSource, SettingsConfigDict, SettingsError

from paceline import __version__
from paceline.checks import MAX_ROWS
from paceline.errors import StartupError
from paceline.kv_memory import parse_kv_memory
from paceline.observe.logs import LogFormat, LogLevel
from paceline.process.variables import check_variables
from paceline.security.settings import Count, Port, SecuritySettings
from paceline.wire.ports import Listening

Seconds = Annotated[float, Field(gt=0)]


def _kv_memory(setting: str) -> str:
    parse_kv_memory(setting)
    return setting


class ServiceSettings(SecuritySettings):
    """What every service can be told."""

    model_config = SettingsConfigDict(
        frozen=True, cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True, extra="forbid"
    )

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: Port = Field(default=0, description="port to listen on; 0 takes any free one")
    metrics_host: str = Field(default="127.0.0.1", description="address to serve Prometheus metrics on")
    metrics_port: Port | None = Field(
        default=None, description="port to serve Prometheus metrics on; 0 takes any free one, unset serves none"
    )
    shutdown_grace_s: Seconds = Field(default=10, description="seconds that running calls get after SIGTERM")
    stop_with_stdin: bool = Field(
        default=False, description="stop when standard input ends, as it does when the starting process is killed"
    )
    trace_file: Path | None = Field(
        default=None, description="append spans to this file as JSON lines, for `paceline trace`; unset: no file"
    )
    log_format: LogFormat = Field(default="console", description="how log lines look")
    log_level: LogLevel = Field(default="info", description="least level that is logged")

    @property
    def listens(self) -> tuple[Listening, ...]:
        """The places where the service will listen."""
        places = (
            ("--port", self.host, self.port),
            ("--metrics-port", self.metrics_host, self.metrics_port),
            ("--health-port", self.host, self.health_port),
        )
        return tuple(Listening(flag, host, port) for flag, host, port in places if port is not None)


class ModelServiceSettings(ServiceSettings):
    """What the draft and the target service can be told."""

    model: str = Field(description="checkpoint directory, hub id, or builtin:target or builtin:draft")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto takes what the checkpoint says"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes cuda where there is one")
    threads: Count | None = Field(default=None, description="threads for model work; unset: torch's choice")
    kv_memory: Annotated[str, AfterValidator(_kv_memory)] = Field(
        default="2GiB", description="most memory for the cache: bytes such as 512MiB, or a share of what is free: 60%%"
    )
    layout: Literal["paged", "dense"] = Field(
        default="paged", description="dense keeps one padded rectangle and realigns it, as the paper's algorithms do"
    )
    page_tokens: Count = Field(default=16, description="tokens a page of the cache holds")
    prefix_sharing: bool = Field(default=True, description="compute equal beginnings of prompts once")
    prefill_chunk_tokens: Count = Field(
        default=256, description="most prompt tokens a call computes, so that long prompts do not stop other streams"
    )
    max_rows: Count = Field(
        default=MAX_ROWS, description="most rows of a call; not less than --batch-size of the coordinator"
    )
    sequence_ttl_s: Seconds = Field(default=600, description="seconds after which a sequence no call names is dropped")

    @model_validator(mode="after")
    def _the_coordinator_may_ask(self) -> Self:
        # The coordinator asks for the description when it starts, and only its name sets it apart from other callers.
        if not self.describe and not self.allowed_names:
            raise ValueError("--describe false would shut out the coordinator; name it in --tls-allowed-names")
        return self


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def _flag(place: tuple[int | str, ...]) -> str:
    """Return the flag that an error at `place` concerns; empty when the error concerns several settings."""
    return "--" + str(place[0]).replace("_", "-") if place else ""


def read_settings(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Read settings from `arguments` (the command line's when None) and the environment.

    Raise StartupError with one line per wrong setting, naming flag or variable, value and remedy.
    """
    command_line: CliSettingsSource[Any] = CliSettingsSource(kind, cli_prog_name=_command(program))
    command_line.root_parser.add_argument(
        "--version", action="version", version=f"paceline {__version__}", help="show the version and exit"
    )
    try:
        values: dict[str, Any] = {
            "_cli_settings_source": command_line(args=True if arguments is None else list(arguments))
        }
        settings = kind(**values)
    except ValidationError as error:
        problems = {_flag(one["loc"]): one for one in reversed(error.errors())}
        raise StartupError("\n".join(f"{program}: {_line(*one)}" for one in problems.items())) from error
    except SettingsError as error:
        raise StartupError(f"{program}: {error}") from error
    try:
        check_variables(kind.model_config["env_prefix"], kind.model_fields)
    except StartupError as error:
        raise StartupError(f"{program}: {error.message}") from error
    return settings


def _command(program: str) -> str:
    """Return how the service was called: `paceline-coordinator`, or `python -m coordinator`."""
    called = Path(sys.argv[0]).name
    return called if called.startswith("paceline-") else f"python -m {program}"


def _line(flag: str, problem: ErrorDetails) -> str:
    given = f" {problem['input']!r}" if flag and problem["type"] != "missing" else ""
    return f"{flag}{given}{': ' if flag else ''}{problem['msg']}"


def parse_settings(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Read settings as `read_settings` does. Exit with status 2 and a message on stderr when one is wrong."""
    try:
        return read_settings(kind, program, arguments)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        sys.exit(2)
