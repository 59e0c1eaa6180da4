"""Options and helpers that several commands share."""

import asyncio
import functools
import inspect
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.console import Console

from paceline.checks import MAX_DRAFT_COUNT, MOST_LANES
from paceline.client import Completion
from paceline.errors import InvalidRequest
from paceline.process.cluster_plan import ClusterOptions
from paceline.process.supervision import Tell
from paceline.types import (
    SOURCE_NAMES,
    ClusterDescription,
    Device,
    DraftingOptions,
    DraftSource,
    Dtype,
    Layout,
    Numerics,
    PolicyName,
    Prompt,
    Quantization,
    SamplingParameters,
    SourceUsage,
    Text,
    UserMessage,
)

Result = TypeVar("Result")

Speculation = Annotated[bool, typer.Option("--speculation/--no-speculation", help="Off: the target decodes plainly.")]
Chat = Annotated[
    bool | None,
    typer.Option("--chat/--raw", help="Put prompts into the chat template, or not. Unset: where the model has one."),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling: the same seed gives the same tokens. Unset: a random one.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of output.")]
TimeoutS = Annotated[
    float | None,
    typer.Option("--timeout", min=0.001, help="Most seconds for a prompt's output, outages included. Unset: any."),
]


DRAFT_COUNT_HELP = (
    f"Draft tokens a round and generation, 0 to {MAX_DRAFT_COUNT}; auto: what pays best by measured times."
)
POLICIES: tuple[str, ...] = get_args(PolicyName)
InputFile = Annotated[
    Path | None, typer.Option("--input", help="SpecBench file, or JSON lines with `prompt`. Unset: the demo's prompts.")
]
Category = Annotated[list[str] | None, typer.Option(help="Only this category of the file; may be repeated.")]
SourceSets = Annotated[
    str,
    typer.Option(
        help="Sources that may draft, one set after another, with commas: all, or any of "
        f"{', '.join(SOURCE_NAMES)}, with + between those of a set."
    ),
]
PromptCount = Annotated[int | None, typer.Option(min=1, help="Only so many prompts, from all over the file.")]


@dataclass(frozen=True)
class PairFlags:
    """Flags of every command that starts services of its own, one cluster or many.

    The services' variables decide a flag that is not given. The defaults in the help texts are the services' own.
    """

    target_model: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_TARGET_MODEL",
            help="Checkpoint directory, hub id (REPOSITORY@REVISION), or builtin:target.",
        ),
    ]
    draft_model: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_DRAFT_MODEL",
            help="Checkpoint directory, hub id (REPOSITORY@REVISION), or builtin:draft; none: no draft service.",
        ),
    ]
    heads: Annotated[
        str,
        typer.Option(
            envvar="PACELINE_TARGET_HEADS",
            help="Folder of heads that draft inside the target service, builtin:clover, or builtin:eagle. Unset: none.",
        ),
    ]
    device: Annotated[
        Device | None,
        typer.Option(help="Where models run. Unset: auto, which takes cuda where there is one."),
    ]
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Most memory for each cache: bytes such as 512MiB, or a share of what is free: 40%. Unset: 2GiB."
        ),
    ]
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_LANES,
            help="Groups in flight at once; more than 2 for a target of as many stages. Unset: 2, with auto drafts 1 "
            "where that gives more, 1 of twice the rows while the target works for other coordinators too, and 1 under "
            "eqspec and exspec.",
        ),
    ]


@dataclass(frozen=True)
class ClusterFlags(PairFlags):
    """Flags of every command that starts one cluster."""

    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of the target's weights and cache. Unset: auto, which takes what the checkpoint says. The draft "
            "takes what is fastest, whatever this says."
        ),
    ]
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            help="int8: the target's products have weights of int8, made at load; its output is that of the "
            "rounded weights. w8a8: their rows are rounded too, on x86 processors with AVX2. Unset: none."
        ),
    ]
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Form of the cache; dense: one rectangle, padded and realigned as the paper's. Unset: paged."
        ),
    ]
    target_tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that divide heads and feed-forward of the target's layers. Unset: 1."),
    ]
    target_pipeline_parallel: Annotated[
        int | None, typer.Option(min=1, help="Ranges of the target's layers, each in a process of its own. Unset: 1.")
    ]
    numerics: Annotated[
        Numerics | None,
        typer.Option(
            help="strict: speculative output equals plain decoding bit for bit. fast gives that up in half precision. "
            "Unset: auto: strict in bfloat16, float16 and with w8a8; else fast, where float32 output equals Hugging "
            "Face's."
        ),
    ]
    batch_size: Annotated[int | None, typer.Option(min=1, help="Most generations in a round. Unset: 8.")]
    draft_count: Annotated[str | None, typer.Option(help=f"{DRAFT_COUNT_HELP} Unset: 5.")]
    policy: Annotated[
        PolicyName | None,
        typer.Option(help="How groups are formed; eqspec and exspec: as in arXiv 2510.22876. Unset: continuous."),
    ]
    shared_suffixes: Annotated[
        bool | None,
        typer.Option(
            "--shared-suffixes/--own-suffixes",
            help="Whether drafts may be looked up in recent outputs of other requests. Unset: false.",
        ),
    ]
    trace_dir: Annotated[
        str | None, typer.Option(help="Folder for spans of each service, for `paceline trace`. Unset: none.")
    ]


SamplingFlags = make_dataclass(
    "SamplingFlags",
    [
        (one.name, Annotated[one.type, typer.Option(help=one.metadata["help"])])
        for one in fields(SamplingParameters)
        if "help" in one.metadata
    ],
)
"""Flags of every command that sends prompts: the parameters that are numbers."""


@dataclass(frozen=True)
class DraftingFlags:
    """Flags of the commands that send prompts: where the drafts of a request may come from."""

    draft_sources: Annotated[
        str | None,
        typer.Option(help=f"Sources that may draft, with commas: of {', '.join(SOURCE_NAMES)}. Unset: all there are."),
    ] = None
    in_order: Annotated[
        bool,
        typer.Option("--in-order", help="The first of --draft-sources that has drafts gives them, not the best one."),
    ] = False
    forbid_sources: Annotated[
        str | None, typer.Option(help="Sources that may not draft, with commas. Unset: none.")
    ] = None
    only_draft_model: Annotated[
        str | None,
        typer.Option(help="Of several draft models behind a coordinator, the one that may draft. Unset: any."),
    ] = None

    def options(self) -> DraftingOptions:
        """Return what a request says. Raise InvalidRequest for a word that is no source."""
        return DraftingOptions(
            _sources("--draft-sources", self.draft_sources),
            self.in_order,
            _sources("--forbid-sources", self.forbid_sources),
            self.only_draft_model or "",
        )


def _sources(flag: str, value: str | None) -> tuple[DraftSource, ...]:
    return () if value is None else tuple(DraftSource(word) for word in comma_list(flag, value, SOURCE_NAMES))


Command = Callable[..., None]


def with_flags(parameter: str, flags: type[Any], make: Callable[..., Any]) -> Callable[[Command], Command]:
    """Return a decorator that adds a dataclass's flags to a command, passed as one argument; `make()` has defaults."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        defaults = make()
        added = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=getattr(defaults, one.name), annotation=one.type
            )
            for one in fields(flags)
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> None:
            chosen = {flag.name: values.pop(flag.name) for flag in added}
            command(**values, **{parameter: make(**chosen)})

        own = [one for name, one in signature.parameters.items() if name != parameter]
        wrapped.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
        return wrapped

    return decorate


with_pair_flags = with_flags("pair", PairFlags, ClusterOptions)
with_cluster_flags = with_flags("options", ClusterFlags, ClusterOptions)
with_drafting_flags = with_flags("drafting", DraftingFlags, DraftingFlags)
with_sampling_flags = with_flags("sampling", SamplingFlags, SamplingParameters)


def teller(console: Console) -> Tell:
    """Return a function that shows messages for people, such as the restart of a service."""
    return lambda words: console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)


def read_text(field: str, path: Path) -> str:
    """Return a file's text, with its own line ends; `-` is standard input. Raise InvalidRequest when there is none."""
    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--{field.replace('_', '-')} {path} cannot be read: {error}", field=field) from error


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's work. SIGTERM ends it as Ctrl-C does: in order, with no service left behind."""

    async def cancellable() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


def as_prompt(text: str, chat: bool | None, cluster: ClusterDescription) -> Prompt:
    use_template = cluster.target.has_chat_template if chat is None else chat
    return UserMessage(text) if use_template else Text(text)


def is_draft_count(word: str) -> bool:
    return word == "auto" or word in map(str, range(MAX_DRAFT_COUNT + 1))


def check_draft_count(wanted: str) -> None:
    """Raise InvalidRequest when `--draft-count` is no draft count."""
    if not is_draft_count(wanted):
        raise InvalidRequest(f"--draft-count is {wanted!r}; give 0 to {MAX_DRAFT_COUNT}, or auto", field="draft_count")


def draft_limit(speculation: bool, options: ClusterOptions) -> int | None:
    """Return the `max_draft_count` for a request. Raise InvalidRequest when the flag is no draft count."""
    wanted = options.draft_count
    if wanted is not None:
        check_draft_count(wanted)
    if not speculation:
        return 0
    return None if wanted in (None, "auto") else int(wanted)


def answer_fields(completion: Completion) -> dict[str, Any]:
    """Return the fields of an output that are written as JSON."""
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish.reason.value,
        "usage": asdict(completion.finish.usage),
        "seed": completion.finish.seed,
    }


def by_source(sources: Sequence[SourceUsage]) -> str:
    """Return ` (draft 10 of 15, suffix 3 of 4)`: accepted of drafted tokens; nothing for one draft service."""
    if len(sources) < 2 and all(one.source is DraftSource.DRAFT for one in sources):
        return ""
    return f" ({', '.join(f'{one.name} {one.accepted_count} of {one.drafted_count}' for one in sources)})"


def comma_list(flag: str, value: str, choices: Sequence[str] = ()) -> tuple[str, ...]:
    """Read `a,b`. Raise InvalidRequest for an empty list or a word that is none of the choices."""
    words = tuple(word.strip() for word in value.split(",") if word.strip())
    if not words:
        raise InvalidRequest(f"{flag} is empty; give words with commas between them", field=flag)
    if choices and (unknown := [word for word in words if word not in choices]):
        raise InvalidRequest(f"{flag} has {unknown[0]!r}; give any of {', '.join(choices)}", field=flag)
    return words


def comma_counts(flag: str, value: str) -> tuple[int, ...]:
    """Read numbers such as `1,8`. Raise InvalidRequest for an empty list or a word that is no number from 1."""
    words = comma_list(flag, value)
    if wrong := [word for word in words if not word.isdecimal() or int(word) < 1]:
        raise InvalidRequest(f"{flag} has {wrong[0]!r}; give numbers from 1 with commas between them", field=flag)
    return tuple(map(int, words))
