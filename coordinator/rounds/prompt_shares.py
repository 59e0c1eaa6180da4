"""How much of their prompts the rows of a call bring, so that no call is large.

A service computes one chunk of prompts a call, however much it is sent. What it has cached of other generations, it
takes over without computing. So a row of which nothing is known yet brings its prompt: what is cached costs no call.
From then on the row brings a chunk, or as much again as was taken over. Owns that rule and the sizes; knows nothing
of rounds.
"""

from collections.abc import Sequence

from coordinator.requests.generation import Lack
from paceline.checks import DECODED_TOKENS

CALL_TOKENS = 16_384
"""Most tokens that the rows of a call bring for what may be cached: a millisecond of translating at each end."""
CHUNKS_BROUGHT = 4
"""Most chunks that the other rows of a call bring: some of them may turn out to wait for one another."""


def prompt_shares(lacks: Sequence[Lack], chunk_tokens: int) -> list[int]:
    """Return how many tokens each row is to bring; 0: the row is better left out of this call.

    Decoding rows bring all. The first prompt is always served, then those that lack least: so does the service share
    its chunk, of `chunk_tokens`.
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
