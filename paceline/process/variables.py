"""Names of the environment variables with the services' settings, and errors for wrong names.

Knows the services but not their settings.
"""

import os
import re
from collections.abc import Collection
from difflib import get_close_matches

from paceline.errors import StartupError

SERVICES = ("coordinator", "draft", "target", "gateway")
NO_DRAFT = "none"
"""Stands for a draft model or a draft service's address where there is to be none."""
NO_HEADS = "none"
"""Stands for the heads of a target that has none."""
_PREFIX = "PACELINE_"
# Kubernetes sets these in every pod of a namespace with a Service named paceline-...
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)$")
_LINKED_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def prefix(service: str) -> str:
    """Return the prefix of a service's variables."""
    return f"{_PREFIX}{service.upper()}_"


def is_set(service: str, setting: str) -> bool:
    """Return whether the environment has a variable for the setting of a service."""
    return prefix(service) + setting.upper() in os.environ


def check_variables(own_prefix: str = "", settings: Collection[str] = ()) -> None:
    """Raise StartupError for a variable that no service reads, or that has `own_prefix` and names none of `settings`.

    Each service checks only its own variables, because all may share one environment.
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
