"""How a service process starts, says where it listens, and ends."""

import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from paceline.errors import PacelineError
from paceline.settings import ServiceSettings
from paceline.telemetry import configure_logs


def run_service(name: str, settings: ServiceSettings, serving: Coroutine[Any, Any, None]) -> None:
    """Run `serving` to its end. A failure that has an explanation is one line on stderr and exit status 1."""
    configure_logs(settings.log_format, settings.log_level, name)
    try:
        uvloop.run(serving)
    except PacelineError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def announce(name: str, address: str, metrics_url: str | None) -> None:
    """Print the one line that stdout gets, so that whoever started the process learns the ports."""
    metrics = f", metrics on {metrics_url}" if metrics_url else ""
    print(f"{name} listening on {address}{metrics}", flush=True)
