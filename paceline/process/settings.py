"""Settings of the services: flags, environment variables and their checks. Knows nothing of the settings' meaning.

A field `kv_memory` of the target service is the flag `--kv-memory` and the variable `PACELINE_TARGET_KV_MEMORY`. Flags
win over variables.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from paceline import __version__
from paceline.checks import MAX_ROWS
from paceline.errors import StartupError
from paceline.kv_memory import parse_kv_memory, parse_memory
from paceline.observe.logs import LogFormat, LogLevel
from paceline.process.ranks import place_here
from paceline.process.variables import check_variables
from paceline.scope import Weights, parse_weights
from paceline.security.limits import LONGEST_TIMEOUT_S
from paceline.security.settings import Count, Port, SecuritySettings
from paceline.types import Device, Dtype, Layout, Quantization, RankGrid
from paceline.wire.ports import Listening

Seconds = Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S, allow_inf_nan=False)]
MODEL = (
    "directory of a checkpoint, id on the Hugging Face hub with or without @REVISION, or the built-in "
    "builtin:target or builtin:draft"
)

QUANTIZATION = (
    "int8: products have weights of int8 with a scale for each column, made at load, for plain decoders; output is "
    "then that of the rounded weights; w8a8: rows are rounded to int8 too, which is faster, on x86 "
    "processors with AVX2 alone; none: weights are of --dtype"
)


def _kv_memory(setting: str) -> str:
    parse_kv_memory(setting)
    return setting


def _memory(setting: str) -> str:
    parse_memory(setting)
    return setting


def _weights(setting: str) -> str:
    parse_weights(setting)
    return setting


class ProcessSettings(BaseSettings):
    """What every process that others call can be told."""

    model_config = SettingsConfigDict(
        frozen=True, cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True, extra="forbid"
    )

    host: str = Field(
        default="127.0.0.1",
        description="address to listen on; 0.0.0.0: all of this machine's, which needs TLS or --plaintext true",
    )
    port: Port = Field(default=0, description="port to listen on; 0 takes any free one, which the service prints")
    metrics_host: str = Field(
        default="127.0.0.1", description="address to serve metrics on, over plain HTTP and to whoever can reach it"
    )
    metrics_port: Port | None = Field(
        default=None,
        description="port to serve Prometheus metrics on; 0 takes any free one; unset: metrics are not served",
    )
    shutdown_grace_s: Seconds = Field(
        default=10,
        description="time from SIGTERM until running calls are cut off; a model service waits half of it for its "
        "generations to move to other replicas",
    )
    stop_with_stdin: bool = Field(
        default=False,
        description="true: stop when standard input ends; so `paceline up` leaves no service behind when it is killed",
    )
    trace_file: Path | None = Field(
        default=None, description="file to append spans to as JSON lines, for `paceline trace`; unset: none"
    )
    log_format: LogFormat = Field(
        default="console", description="form of log lines: console for people, json (an object a line) for machines"
    )
    log_level: LogLevel = Field(default="info", description="least severity of the lines that are written")

    @property
    def listens(self) -> tuple[Listening, ...]:
        """The places where the process will listen."""
        return self._asked_for(
            ("--port", self.host, self.port), ("--metrics-port", self.metrics_host, self.metrics_port)
        )

    @staticmethod
    def _asked_for(*places: tuple[str, str, int | None]) -> tuple[Listening, ...]:
        return tuple(Listening(flag, host, port) for flag, host, port in places if port is not None)


class ServiceSettings(ProcessSettings, SecuritySettings):
    """What every service that speaks gRPC can be told."""

    # Else that of the last class it is made of holds.
    model_config = ProcessSettings.model_config

    @property
    def listens(self) -> tuple[Listening, ...]:
        return (*super().listens, *self._asked_for(("--health-port", self.host, self.health_port)))


class ModelServiceSettings(ServiceSettings):
    """What the draft and the target service can be told."""

    model: str = Field(description=MODEL)
    dtype: Dtype = Field(
        default="auto", description="type of the weights and the cache; auto: what the checkpoint's config.json says"
    )
    quantization: Literal["auto", Quantization] = Field(default="none", description=QUANTIZATION)
    device: Device = Field(
        default="auto", description="where the model runs; auto: cuda where torch sees such a device, else cpu"
    )
    threads: Count | None = Field(
        default=None,
        description="CPU threads for the model's work, in each process of a model over several; unset: as many "
        "as torch finds cores, which in a container may be more than it was given",
    )
    tensor_parallel: Count = Field(
        default=1,
        description="processes that divide heads and feed-forward of each layer, for plain decoders and for what "
        "transformers has a tensor-parallel plan for; each has a device and its part of weights and cache. Started by "
        "torchrun, or on one machine by the service",
    )
    pipeline_parallel: Count = Field(
        default=1,
        description="ranges of layers, for plain decoders, each of them held by as many processes as --tensor-parallel "
        "says; results are those of one process, bit for bit",
    )
    rank_timeout_s: Seconds = Field(
        default=60,
        description="time without an answer after which a process of a model over several is given up, and with it the "
        "service, which is then to be started anew; a pass through all of them has to fit: where passes are slow, give "
        "more, or a smaller --prefill-chunk-tokens",
    )
    memory: Annotated[str, AfterValidator(_memory)] | None = Field(
        default=None,
        description="memory for all that the service takes, such as 16GiB: weights, cache and the work of its calls; "
        "the cache gets what is left, so --kv-memory is not given then. On a GPU it is the device's memory; on a CPU "
        "it needs the compiled kernels. Unset: --kv-memory bounds the cache alone",
    )
    kv_memory: Annotated[str, AfterValidator(_kv_memory)] = Field(
        default="2GiB",
        description="memory for the cache of keys and values, in each process of a model over several: bytes such as "
        "512MiB, or a share of what is free once the model is loaded, such as 60%, which those on one host or GPU "
        "divide; while a target's is full, generations wait; while a draft's is, they "
        "get no drafts",
    )
    layout: Layout = Field(
        default="paged",
        description="form of the cache; dense: one padded rectangle that is realigned each round, slower, to compare "
        "with the published algorithms",
    )
    page_tokens: Count = Field(
        default=16,
        description="size of the pages that the paged cache is given out in, and that prompts share: larger ones "
        "waste more at each sequence's end",
    )
    prefix_sharing: bool = Field(
        default=True,
        description="compute and keep equal beginnings of prompts once, in the paged cache; false: each for itself",
    )
    prefill_chunk_tokens: Count = Field(
        default=256,
        description="most prompt tokens that one call computes, for all its rows together; fewer delay running streams "
        "less, more read long prompts faster",
    )
    max_rows: Count = Field(
        default=MAX_ROWS,
        description="most rows of a call, and of calls that share a pass; calls with more are refused: give at least "
        "the coordinator's --batch-size, and where coordinators share the service twice that for each of them",
    )
    caller_weights: Annotated[str, AfterValidator(_weights)] = Field(
        default="",
        description="shares of callers by a name in their certificate, such as batch=1,chat=3: where calls must wait, "
        "and where the cache is full, a caller of weight 3 gets three times as much as one of weight 1, which all "
        "others have; unset: all have equal shares",
    )
    sequence_ttl_s: Seconds = Field(
        default=600,
        description="time without a call that names a sequence, after which its cache is freed; if it still runs, "
        "the coordinator sends it again",
    )

    @property
    def weights(self) -> Weights:
        return parse_weights(self.caller_weights)

    @model_validator(mode="after")
    def _weights_are_of_names(self) -> Self:
        if self.caller_weights and not self.tls_client_ca:
            raise ValueError("--caller-weights needs certificates that can be trusted; give --tls-client-ca too")
        return self

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.tensor_parallel, self.pipeline_parallel)

    @property
    def listens(self) -> tuple[Listening, ...]:
        place = place_here(self.grid)
        return () if place and place.rank else super().listens

    @model_validator(mode="after")
    def _ranks_share_pages(self) -> Self:
        if self.layout == "dense" and self.grid.rank_count > 1:
            raise ValueError(
                f"--layout dense cannot be had of a model over {self.grid.rank_count} processes; give --layout paged"
            )
        return self

    @model_validator(mode="after")
    def _one_bound_of_memory(self) -> Self:
        if self.memory is not None and "kv_memory" in self.model_fields_set:
            raise ValueError(
                f"--memory {self.memory} and --kv-memory {self.kv_memory} are both given; give --memory for all that "
                "the service takes, or --kv-memory for its cache alone"
            )
        return self

    @model_validator(mode="after")
    def _the_coordinator_may_ask(self) -> Self:
        # The coordinator asks for the description when it starts, and only its name sets it apart from other callers.
        if not self.describe and not self.allowed_names:
            raise ValueError("--describe false would shut out the coordinator; name it in --tls-allowed-names")
        return self


_REMEDIES = {
    "bool_parsing": "give true or false",
    "int_parsing": "give a whole number",
    "int_from_float": "give a whole number",
    "float_parsing": "give a number",
    "finite_number": "give a number",
    "greater_than": "give more than {gt:g}",
    "greater_than_equal": "give {ge} or more",
    "less_than_equal": "give {le:.0f} or less",
    "literal_error": "give {expected}",
}
"""What to do, by pydantic's types of errors; its own words for others."""
SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def flag_of(setting: str) -> str:
    """Return the flag of a setting."""
    return "--" + setting.replace("_", "-")


def as_flags(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return settings as a service's flags; None leaves one out."""
    known = {name: value for name, value in values.items() if value is not None}
    return tuple(word for name, value in known.items() for word in (flag_of(name), str(value)))


def read_settings(kind: type[SettingsT], program: str, arguments: Sequence[str] | None) -> SettingsT:
    """Read settings from `arguments` (the command line's when None) and the environment.

    Raise StartupError with one line per wrong setting, naming flag or variable, value and remedy.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    command_line: CliSettingsSource[Any] = CliSettingsSource(kind, cli_prog_name=_command(program))
    # argparse would show every flag in a usage of thirty lines, before the error too.
    command_line.root_parser.usage = f"{_command(program)} [--SETTING VALUE ...]"
    example = kind.model_config["env_prefix"] + "LOG_LEVEL"
    command_line.root_parser.epilog = f"Settings are variables too: --log-level is {example}. A flag wins over it."
    command_line.root_parser.add_argument(
        "--version", action="version", version=f"paceline {__version__}", help="show the version and exit"
    )
    try:
        values: dict[str, Any] = {"_cli_settings_source": command_line(args=words)}
        settings = kind(**values)
    except ValidationError as error:
        lines = _lines(error.errors(), kind.model_config["env_prefix"], words)
        raise StartupError("\n".join(f"{program}: {line}" for line in lines)) from error
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


def _lines(errors: Sequence[ErrorDetails], env_prefix: str, words: Sequence[str]) -> Iterator[str]:
    """Yield a line per wrong setting, and one per error that concerns several settings."""
    for setting, together in groupby(errors, lambda one: str(one["loc"][0]) if one["loc"] else ""):
        # A setting of several types has an error for each.
        problems = list(together)
        remedy = ", or ".join(_remedy(one) for one in problems)
        flag, variable = flag_of(setting), env_prefix + setting.upper()
        if not setting:
            yield remedy
        elif problems[0]["type"] == "missing":
            yield f"{flag} is needed; give it, or set {variable}"
        else:
            is_variable = variable in os.environ and flag not in {word.partition("=")[0] for word in words}
            yield f"{variable if is_variable else flag} {problems[0]['input']!r}: {remedy}"


def _remedy(problem: ErrorDetails) -> str:
    if found := _REMEDIES.get(problem["type"]):
        return found.format(**problem.get("ctx", {}))
    return problem["msg"].removeprefix("Value error, ")


def parse_settings(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Read settings as `read_settings` does. Exit with status 2 and a message on stderr when one is wrong."""
    try:
        return read_settings(kind, program, arguments)
    except StartupError as error:
        print(error.message, file=sys.stderr)
        sys.exit(2)
