"""Start the draft service: `python -m draft_service --help`."""

from draft_service.config import DraftSettings
from paceline.codec.names import DRAFT_SERVICE
from paceline.process.ranks import joined_ranks
from paceline.process.service import run_service, server_options
from paceline.process.settings import parse_settings


def main() -> None:
    settings = parse_settings(DraftSettings, "draft_service")
    run_service("draft_service", settings, serve(settings))


async def serve(settings: DraftSettings) -> None:
    options = server_options(settings)
    # Imported late: help and refusals of wrong settings come without torch, which takes seconds.
    from paceline.engine.model.hub import local_folder

    local_folder(settings.model)

    async with joined_ranks("draft_service", settings.grid) as ranks:
        from draft_service.servicer import add_draft_service
        from paceline.engine.loading import load_fastest
        from paceline.model_service.serving import serve_model

        await serve_model("draft_service", settings, options, ranks, DRAFT_SERVICE, add_draft_service, load_fastest)


if __name__ == "__main__":
    main()
