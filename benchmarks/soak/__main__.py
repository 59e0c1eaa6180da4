"""Soak a cluster of processes: `python -m benchmarks.soak --duration-s 1200`.

Exit status 1 when an output differs from its reference, a request fails, something leaks, or a service takes more
than its memory.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands import run_command
from benchmarks.soak.clients import PATIENCE_S
from benchmarks.soak.cluster import SoakOptions
from benchmarks.soak.faults import KINDS
from benchmarks.soak.report import is_sound, problems, summary, table
from benchmarks.soak.run import Connect, Plan, soak
from benchmarks.soak.tls import RunCertificates, make_certificates
from paceline.client import NO_RETRIES, Client, RetryPolicy
from paceline.files import replace_file
from paceline.security.channels import LOCAL

PATIENT = RetryPolicy(PATIENCE_S, max_delay_s=2.0)
console = Console(highlight=False)


def main(
    duration_s: float = 1200.0,
    calm_share: Annotated[float, typer.Option(help="Part of the duration, at its end, without faults.")] = 0.25,
    clients: Annotated[int, typer.Option(help="Requests in flight.")] = 6,
    requests: Annotated[int, typer.Option(help="Different requests.")] = 48,
    fault: Annotated[list[str], typer.Option(help=f"Any of: {', '.join(KINDS)}.")] = list(KINDS),  # noqa: B006
    gap_s: Annotated[tuple[float, float], typer.Option(help="Shortest and longest time between faults.")] = (1.0, 6.0),
    tolerate: Annotated[list[str], typer.Option(help="Faults that may fail requests.")] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option(help="Clients take broken streams up again.")] = True,
    targets: int = 1,
    drafts: int = 1,
    dtype: Annotated[str, typer.Option(help="Type of the targets' weights and cache.")] = "auto",
    target_memory: Annotated[str | None, typer.Option(help="For all that a target takes; more is a failure.")] = None,
    draft_memory: Annotated[str | None, typer.Option(help="For all that a draft service takes.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Mutual TLS on every hop.")] = False,
    seed: int = 1,
    output: Annotated[Path | None, typer.Option(help="Write all of it as JSON.")] = None,
) -> None:
    if unknown := {*fault, *tolerate} - set(KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: give {', '.join(KINDS)}")
    plan = Plan(duration_s, calm_share, clients, requests, tuple(fault), gap_s, tuple(tolerate), resume, seed)
    with tempfile.TemporaryDirectory() as folder:
        certificates = make_certificates(Path(folder)) if tls else None
        options = SoakOptions(
            targets,
            drafts,
            dtype=dtype,
            target_memory=target_memory,
            draft_memory=draft_memory,
            tls_flags=certificates.service_flags if certificates else (),
            coordinator_flags=certificates.coordinator_flags if certificates else (),
        )
        result = asyncio.run(soak(options, plan, connecting(certificates, PATIENT if resume else NO_RETRIES)))
    console.print(table(result))
    for line in problems(result):
        console.print(line, style="red", markup=False)
    if output:
        replace_file(output, json.dumps(summary(result), indent=2) + "\n")
    sys.exit(not is_sound(result))


def connecting(certificates: RunCertificates | None, retries: RetryPolicy) -> Connect:
    security = certificates.client_security if certificates else LOCAL
    return lambda address: Client(address, retries, security=security)


if __name__ == "__main__":
    run_command(main)
