"""Start the target service: `python -m target_service --help`."""

from paceline.engine.serving import serve_model
from paceline.service import run_service
from paceline.settings import parse_settings
from target_service.config import TargetSettings
from target_service.servicer import SERVICE_NAME, add_target_service


def main() -> None:
    settings = parse_settings(TargetSettings, "target_service")
    run_service("target_service", settings, serve_model("target_service", settings, SERVICE_NAME, add_target_service))


if __name__ == "__main__":
    main()
