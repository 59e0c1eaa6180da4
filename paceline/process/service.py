"""The start, announcement and end of a service process."""

import gc
import os
import sys
from collections.abc import Coroutine
from contextlib import closing, suppress
from typing import Any, NoReturn

import structlog
import uvloop

from paceline import __version__
from paceline.errors import PacelineError
from paceline.extras import named_extras
from paceline.observe.logs import configure_logs, forward_library_logs
from paceline.process.settings import ProcessSettings, ServiceSettings
from paceline.security.access import Check, allowed_names
from paceline.security.certificates import watch_certificates
from paceline.security.plaintext import check_listening
from paceline.wire import ServerOptions, end_at_signals, ends_with_stdin
from paceline.wire.ports import check_ports_free


def run_service(name: str, settings: ProcessSettings, serving: Coroutine[Any, Any, None]) -> None:
    """Run `serving` to its end. A PacelineError becomes one line on stderr and exit status 1."""
    configure_logs(settings.log_format, settings.log_level, name)
    forward_library_logs()
    structlog.get_logger().info("starting", version=__version__)
    # Before it serves, it can exit at once: a model is loaded in a thread, for minutes, that nothing else ends.
    end_at_signals()
    try:
        with named_extras():
            uvloop.run(_served(settings, serving))
    except PacelineError as error:
        if settings.log_format == "json":
            structlog.get_logger().critical(error.message)
        else:
            print(f"{name}: {error.message}", file=sys.stderr, flush=True)
        # Python would wait for all threads, and one may wait for ever for a device that is lost.
        os._exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


async def _served(settings: ProcessSettings, serving: Coroutine[Any, Any, None]) -> None:
    """Check the ports before the service opens any of them."""
    with closing(serving):
        check_ports_free(settings.listens)
        if settings.stop_with_stdin:
            # Until the service waits for its own end: it may look for a target, or load a model, for minutes.
            ends_with_stdin(_end_unserving)
        await serving


def _end_unserving() -> NoReturn:
    structlog.get_logger().info("standard input has ended before the service listened; it ends too")
    os._exit(1)


def freeze_heap() -> None:
    """Exempt all present objects from garbage collection. Call it once all is loaded, before the first request.

    These objects last as long as the process, and scanning them stops a model service for 0.15 s.
    """
    gc.collect()
    gc.freeze()
    # Python collects all once a quarter more is there than the last time. It shall not count what is exempt: gRPC's
    # states of ended calls lie in circles, and what they know waits with them.
    gc.collect()


def announce(name: str, address: str, *metrics_urls: str | None) -> None:
    """Print the only line on stdout, from which the starting process learns the ports. None serves no metrics."""
    known = ", ".join(filter(None, metrics_urls))
    metrics = f", metrics on {known}" if known else ""
    with suppress(BrokenPipeError):  # that process is gone; with --stop-with-stdin, this one ends next
        print(f"{name} listening on {address}{metrics}", flush=True)


def server_options(settings: ServiceSettings, *more_checks: Check) -> ServerOptions:
    """Make a server's options from the settings.

    Raise StartupError when a file is wrong or plaintext would leave the machine without permission.
    """
    check_listening(settings.host, encrypted=settings.tls_certificate is not None, plaintext=settings.plaintext)
    certificates = None
    if settings.tls_certificate:
        certificates = watch_certificates(
            "--tls-certificate, --tls-key and --tls-client-ca",
            settings.tls_certificate,
            settings.tls_key,
            settings.tls_client_ca,
        )
    checks = (allowed_names(settings.allowed_names), *more_checks) if settings.allowed_names else more_checks
    return ServerOptions(
        certificates=certificates,
        checks=checks,
        health_port=settings.health_port,
        reflection=settings.reflection,
        max_message_bytes=settings.max_message_bytes,
        max_concurrent_streams=settings.max_concurrent_streams,
    )
