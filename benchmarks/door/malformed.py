"""Whether bad requests are refused in OpenAI's form, and the gateway is well afterwards."""

from collections import Counter
from dataclasses import dataclass, field

from tests.fuzzing.bad_requests import BadRequest, bad_requests
from tests.fuzzing.drawing import for_each
from tests.fuzzing.http_answers import answer_to, complaint


@dataclass
class Refusals:
    """What was answered to bad requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by status; 0 for none."""
    defects: Counter[str] = field(default_factory=Counter)
    """Requests by what was wrong with them."""
    complaints: list[str] = field(default_factory=list)
    """Requests whose answer was no refusal in the form, each with why."""


def drawn_requests(count: int, seed: int) -> list[BadRequest]:
    requests: list[BadRequest] = []
    for_each(bad_requests(), count, seed, requests.append)
    return requests


async def refusals(address: str, requests: list[BadRequest]) -> Refusals:
    """Send the requests one by one, each over a connection of its own."""
    found = Refusals()
    for one in requests:
        answer = await answer_to(address, one.content)
        found.statuses[answer.status if answer else 0] += 1
        found.defects[one.defect] += 1
        if problem := complaint(answer):
            found.complaints.append(f"{one.defect}, {one.content[:500]!r}: {problem}")
    return found
