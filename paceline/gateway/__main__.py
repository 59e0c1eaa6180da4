"""Start the gateway: `python -m paceline.gateway --coordinator HOST:PORT`, or `paceline gateway`."""

from collections.abc import Sequence

from paceline.gateway.config import GatewaySettings
from paceline.gateway.serving import serve
from paceline.process.service import run_service
from paceline.process.settings import parse_settings

MODULE = "paceline.gateway"


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_settings(GatewaySettings, MODULE, arguments)
    run_service("gateway", settings, serve(settings))


if __name__ == "__main__":
    main()
