"""The id of a request, in answers, log lines and spans: what its caller calls it, or else one that is drawn."""

import re
import secrets

REQUEST_ID = "x-request-id"
"""Header, and key of metadata, in which callers give theirs."""
_SANE = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


def request_id_of(given: str) -> str:
    """Return a caller's own id, or a new one where that is none that can stand in a header and in a line of a log."""
    return given if _SANE.fullmatch(given) else secrets.token_hex(8)
