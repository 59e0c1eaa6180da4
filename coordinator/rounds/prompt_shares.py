"""The share of its prompt that each row of a call brings, so that no call is large.

A service computes one chunk of prompts a call, however much it is sent. Prefixes that it has cached for other
generations it takes over without computing. So the first row of a generation brings its prompt: cached parts cost no
further calls. Later rows bring a chunk, or as much again as was taken over. Owns this rule and the sizes; knows nothing
of rounds.
"""

from collections.abc import Sequence

from coordinator.requests.generation import Lack
from paceline.checks import DECODED_TOKENS

CALL_TOKENS = 16_384
"""Most tokens of a call in rows whose prompt may be cached: translating them takes a millisecond at each end."""
CHUNKS_BROUGHT = 4
"""Most chunks that the other rows of a call bring. More than one, because some rows may turn out to wait for others."""


def prompt_shares(lacks: Sequence[Lack], chunk_tokens: int) -> list[int]:
    """Return the number of tokens that each row is to bring; 0 leaves the row out of this call.

    Decoding rows bring all. The first prompt is always served, then those that lack least. The service shares its chunk
    of `chunk_tokens` in the same order.
    """
    shares = [lack.count for lack in lacks]
    prompts = [index for index, lack in enumerate(lacks) if lack.count > DECODED_TOKENS]
    may_be_cached, to_compute = CALL_TOKENS, CHUNKS_BROUGHT * chunk_tokens
    for index in prompts[:1] + sorted(prompts[1:], key=lambda one: lacks[one].count):
        share = _wish(lacks[index], chunk_tokens)
        left = to_compute if share <= chunk_tokens else may_be_cached
        if share > left and index != prompts[0]:
            share = 0
        elif share <= chunk_tokens:
            to_compute -= share
        else:
            may_be_cached -= share
        shares[index] = share
    return shares


def _wish(lack: Lack, chunk_tokens: int) -> int:
    taken_count = CALL_TOKENS if lack.taken_count is None else lack.taken_count
    return min(lack.count, CALL_TOKENS, max(chunk_tokens, taken_count, DECODED_TOKENS))
