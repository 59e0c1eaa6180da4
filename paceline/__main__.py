"""`paceline`, and `python -m paceline`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback while it is imported too, for a second or more."""
    try:
        from paceline.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
