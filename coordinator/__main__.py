"""Start the coordinator: `python -m coordinator --draft HOST:PORT --target HOST:PORT`."""

from coordinator.config import CoordinatorSettings
from coordinator.processes import supervise
from coordinator.serving import serve
from paceline.process.service import run_service
from paceline.process.settings import parse_settings


def main() -> None:
    settings = parse_settings(CoordinatorSettings, "coordinator")
    is_one = settings.processes == 1 or settings.process_index is not None
    run_service("coordinator", settings, serve(settings) if is_one else supervise(settings))


if __name__ == "__main__":
    main()
