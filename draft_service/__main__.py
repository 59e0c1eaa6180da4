"""Start the draft service: `python -m draft_service --help`."""

from draft_service.config import DraftSettings
from draft_service.servicer import SERVICE_NAME, add_draft_service
from paceline.engine.serving import serve_model
from paceline.service import run_service
from paceline.settings import parse_settings


def main() -> None:
    settings = parse_settings(DraftSettings, "draft_service")
    run_service("draft_service", settings, serve_model("draft_service", settings, SERVICE_NAME, add_draft_service))


if __name__ == "__main__":
    main()
