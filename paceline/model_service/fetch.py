"""Fetches a model into the hub's cache: `python -m paceline.model_service.fetch MODEL`.

A container that runs before a service does this. It finds the model as the service will, which then only reads.
"""

import asyncio
import sys
from argparse import ArgumentParser

from paceline.errors import PacelineError
from paceline.wire import end_at_signals


def main() -> None:
    end_at_signals()
    parser = ArgumentParser("paceline.model_service.fetch", description="Fetch a model into the hub's cache.")
    parser.add_argument("model", help="as --model of the service: a hub id, with @REVISION or without, or a directory")
    model = parser.parse_args().model
    # Imported late: a signal ends the import too, which takes seconds.
    from paceline.engine.model.checkpoint import find_checkpoint

    try:
        # The main thread alone hears signals, and would not while it waits in a library's own code.
        asyncio.run(asyncio.to_thread(find_checkpoint, model))
    except PacelineError as error:
        sys.exit(f"fetch: {error.message}")


if __name__ == "__main__":
    main()
