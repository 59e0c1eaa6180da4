"""The version of the wire between coordinators and model services, and the checks that refuse other versions.

A version fixes what the rows of a request mean. A new version is made only when a peer that does not know it would
misread them; fields that a peer may ignore need none.

| version | meaning |
|---|---|
| 0 | messages carry no version; a rule comes with every row |
| 1 | a rule is told once for a sequence; a row may bring a part of a prompt |
| 2 | a rule may have a response format |
| 3 | a request may name sequences to free |

A request carries the lowest version that its rows need, so that older services go on to serve all others.
"""

from paceline.errors import IncompatiblePair, InvalidRequest, PeerUnavailable
from paceline.types import ChoiceRule
from paceline.v1 import common_pb2

VERSION = 3
RULES_TOLD_ONCE = 1
"""Since this version a row without a rule relies on the rule told before; in older versions it decodes greedily."""
RESPONSE_FORMATS = 2
"""Since this version a rule may have a response format; older services would pass it over."""
RELEASES_ALONG = 3
"""Since this version services free what a request names; older ones pass over it, and are to be told by a call."""
EARLIEST_REQUEST = 0
"""Oldest version of requests that model services read."""
EARLIEST_SERVICE = 1
"""Oldest version of services that coordinators ask. Older ones ignore rules told before, and decode half prompts."""


def version_of(rule: ChoiceRule | None) -> int:
    """Return the version that a row with this rule is written in."""
    return RESPONSE_FORMATS if rule and rule.response_format else RULES_TOLD_ONCE


def version_refusal(rule: ChoiceRule | None, latest: int, kind: str) -> InvalidRequest:
    """Return the refusal of a row whose rule a service is too old for; `latest` is that service's version."""
    return InvalidRequest(
        f"response_format needs version {version_of(rule)} of the wire, and {kind} speaks {latest}; upgrade it",
        field="response_format",
    )


def versions_to_pb() -> common_pb2.WireVersions:
    """Return the versions that a model service reports."""
    return common_pb2.WireVersions(latest=VERSION, earliest=EARLIEST_REQUEST)


def check_request_version(context: common_pb2.RequestContext) -> None:
    """Raise InvalidRequest for a request that this model service would misread."""
    if not EARLIEST_REQUEST <= context.wire_version <= VERSION:
        raise InvalidRequest(
            f"the request is written in version {context.wire_version} of the wire, and this service reads "
            f"{EARLIEST_REQUEST} to {VERSION}; upgrade the model services before the coordinators",
            field="context.wire_version",
        )


def check_service_versions(wire: common_pb2.WireVersions, kind: str) -> None:
    """Raise IncompatiblePair for a service that this coordinator cannot work with; `kind` names the service."""
    if wire.latest < EARLIEST_SERVICE:
        raise IncompatiblePair(
            f"{kind} speaks version {wire.latest} of the wire, and this coordinator {VERSION}, which needs "
            f"{EARLIEST_SERVICE} at least; upgrade the model services before the coordinators"
        )
    if wire.earliest > VERSION:
        raise IncompatiblePair(
            f"{kind} speaks versions {wire.earliest} to {wire.latest} of the wire, and this coordinator {VERSION}; "
            "upgrade the coordinator"
        )


def check_answer_version(version: int, kind: str) -> None:
    """Raise PeerUnavailable for an answer of a service that this coordinator cannot work with.

    It took the place of the service that was described and checked, so it may have misread the request.
    """
    if version < EARLIEST_SERVICE:
        raise PeerUnavailable(
            f"{kind} that speaks version {version} of the wire answers where another was, and this coordinator needs "
            f"{EARLIEST_SERVICE} at least; upgrade it"
        )
