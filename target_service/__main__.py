"""Start the target service: `python -m target_service --help`."""

from functools import partial

from paceline.codec.names import TARGET_SERVICE
from paceline.process.ranks import joined_ranks
from paceline.process.service import run_service, server_options
from paceline.process.settings import parse_settings
from target_service.config import TargetSettings


def main() -> None:
    settings = parse_settings(TargetSettings, "target_service")
    run_service("target_service", settings, serve(settings))


async def serve(settings: TargetSettings) -> None:
    options = server_options(settings)
    # Imported late: help and refusals of wrong settings come without torch, which takes seconds.
    from paceline.engine.model.hub import local_folder

    local_folder(settings.model)

    async with joined_ranks("target_service", settings.grid) as ranks:
        from paceline.engine.heads.loading import load_heads
        from paceline.model_service.serving import serve_model
        from target_service.servicer import add_target_service

        add = partial(add_target_service, threads_beside_draft=settings.threads_beside_draft)
        find_heads = partial(load_heads, settings.heads)
        await serve_model(
            "target_service", settings, options, ranks, TARGET_SERVICE, add, find_heads=find_heads, overlaps=True
        )


if __name__ == "__main__":
    main()
