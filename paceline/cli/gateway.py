"""`paceline gateway`: OpenAI's HTTP in front of coordinators that run already."""

import typer

from paceline.gateway.__main__ import main

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Flags are the gateway's settings, which are read as those of every service."""


def command(context: typer.Context) -> None:
    """Serve OpenAI's HTTP and a page in front of coordinators. Its flags are the gateway's settings."""
    main(context.args)
