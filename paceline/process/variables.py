"""The environment variables that services read their settings from: their names, and what a wrong name gets.

Knows which services there are, and not what settings they have.
"""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches

from paceline.errors import StartupError

SERVICES = ("coordinator", "draft", "target")
_PREFIX = "PACELINE_"
# What Kubernetes tells every pod of a namespace about a Service named paceline-..., wanted or not.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)$")
_LINKED_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def prefix(service: str) -> str:
    """How the variables of a service begin."""
    return f"{_PREFIX}{service.upper()}_"


def is_set(service: str, setting: str) -> bool:
    """Whether the environment says a setting of a service."""
    return prefix(service) + setting.upper() in os.environ


def check_variables(own_prefix: str = "", settings: Collection[str] = ()) -> None:
    """Raise StartupError for a variable that no service reads, or that has the own prefix and is no setting of it.

    Those of the other services are theirs to check: all may share one environment.
    """
    for name, value in sorted(os.environ.items()):
        if not name.startswith(_PREFIX) or _SERVICE_LINK.search(name):
            continue
        owner = next((one for one in map(prefix, SERVICES) if name.startswith(one)), "")
        if not owner and not (name.endswith("_PORT") and _LINKED_ADDRESS.match(value)):
            raise StartupError(_no_service(name))
        if owner and owner == own_prefix and (setting := name.removeprefix(owner).lower()) not in settings:
            found = get_close_matches(setting, settings, 1)
            meant = f"did you mean {owner}{found[0].upper()}?" if found else "--help lists what there is"
            raise StartupError(f"{name} is set, and there is no such setting; {meant}")


def _no_service(name: str) -> str:
    word, _, setting = name.removeprefix(_PREFIX).partition("_")
    found = get_close_matches(word.lower(), SERVICES, 1)
    meant = f"; did you mean {prefix(found[0])}{setting}?" if found and setting else ""
    return f"{name} is set, and no service reads it: names begin with {', '.join(map(prefix, SERVICES))}{meant}"
