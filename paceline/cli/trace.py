"""`paceline trace`: reports on where time went, from spans in files or sent by services."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.consoles import words_console
from paceline.cli.options import run_async
from paceline.errors import InvalidRequest
from paceline.files import check_distinct
from paceline.observe.records import SpanRecord, read_spans, span_files
from paceline.observe.report.analysis import RequestTrace, requests_of, summarize, verdict
from paceline.observe.report.perfetto import write_perfetto
from paceline.observe.report.receiver import running_receiver
from paceline.observe.report.rendering import LEAST_WIDTH, hop_table, source_table, waterfall
from paceline.security.channels import is_port
from paceline.wire import termination


def command(
    files: Annotated[
        list[str] | None, typer.Argument(help="What --trace-file wrote, or its folder; globs are taken.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to receive spans at by OTLP/gRPC instead, until Ctrl-C.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(help="Trace id of the request to show, or its beginning. Unset: the slowest.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace to this file; ui.perfetto.dev shows it.")
    ] = None,
) -> None:
    """Show a request's rounds, and which hop to fix. A table has the hops of all requests."""
    if bool(files) == bool(listen):
        raise typer.BadParameter("give files of spans, or --listen HOST:PORT", param_hint="FILES")
    if perfetto:
        for one in span_files(files or ()):
            check_distinct(one, perfetto, ("FILES", "--perfetto"))
    spans = read_spans(files) if files else run_async(_receive(str(listen)))
    report(words_console(), spans, request, perfetto)


async def _receive(listen: str) -> list[SpanRecord]:
    host, _, port = listen.rpartition(":")
    if not host or not is_port(port):
        raise typer.BadParameter(f"{listen} is not HOST:PORT, such as 127.0.0.1:4317", param_hint="--listen")
    async with running_receiver(host, int(port)) as receiver:
        print(f"receiving spans at {receiver.address}; Ctrl-C shows them", flush=True)
        await termination()
    return receiver.spans


def report(console: Console, spans: list[SpanRecord], request: str | None, perfetto: Path | None) -> None:
    """Print one request's waterfall, the table of all answered requests and the verdict; write the Chrome trace.

    Raise InvalidRequest when there is no such request, or none at all.
    """
    # A file may be named twice, and a span may be sent again.
    spans = list({(one.trace_id, one.span_id): one for one in spans}.values())
    requests = requests_of(spans)
    console.width = max(console.width, LEAST_WIDTH)
    console.print(waterfall(_chosen(requests, request), console.width))
    if answered := [one for one in requests if one.is_answered]:
        console.print()
        console.print(hop_table(summarize(answered), answered))
        if sources := source_table(answered):
            console.print(sources)
        console.print(verdict(answered))
    if len(answered) < len(requests):
        console.print(f"{len(requests) - len(answered)} requests that got no whole answer are left out.", style="dim")
    if perfetto:
        write_perfetto(spans, perfetto)
        console.print(f"{perfetto}: open it at https://ui.perfetto.dev")


def _chosen(requests: list[RequestTrace], trace_id: str | None) -> RequestTrace:
    found = [one for one in requests if one.span.trace_id.startswith((trace_id or "").lower())]
    if not found:
        wanted = f"of a request whose trace id begins with {trace_id}" if trace_id else "of any request"
        raise InvalidRequest(f"there is no span {wanted}; is the coordinator's file among them, and was it sampled?")
    return max(found, key=lambda one: one.latency_s)
