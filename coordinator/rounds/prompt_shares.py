"""The share of its prompt that each row of a call brings, so that no call is large.

A service computes one chunk of prompts a call, however much it is sent. Prefixes that it has cached for other
generations it takes over without computing. So the first row of a generation brings its prompt: cached parts cost no
further calls. Later rows bring a chunk, or as much again as was taken over. Owns this rule and the sizes; knows nothing
of rounds.
"""

from collections.abc import Callable, Sequence

from paceline.checks import DECODED_TOKENS

CALL_TOKENS = 16_384
"""Most tokens of a call in rows whose prompt may be cached: translating them takes a millisecond at each end."""
CHUNKS_BROUGHT = 4
"""Most chunks that the other rows of a call bring. More than one, because some rows may turn out to wait for others."""


def prompt_shares(lacks: Sequence[int], taken: Callable[[int], int | None], chunk_tokens: int) -> list[int]:
    """Return the number of tokens that each row is to bring; 0 leaves the row out of this call.

    `lacks` are the committed tokens, at least one, that the service is not known to hold of each row. `taken` returns
    how many it took of a row's generation the last time; None: there was no such time, and it may hold more.

    Decoding rows bring all. The first prompt is always served, then those that lack least. The service shares its chunk
    of `chunk_tokens` in the same order.
    """
    shares = [*lacks]
    prompts = [index for index, lack in enumerate(lacks) if lack > DECODED_TOKENS]
    may_be_cached, to_compute = CALL_TOKENS, CHUNKS_BROUGHT * chunk_tokens
    for index in prompts[:1] + sorted(prompts[1:], key=lacks.__getitem__):
        share = _wish(lacks[index], taken(index), chunk_tokens)
        left = to_compute if share <= chunk_tokens else may_be_cached
        if share > left and index != prompts[0]:
            share = 0
        elif share <= chunk_tokens:
            to_compute -= share
        else:
            may_be_cached -= share
        shares[index] = share
    return shares


def _wish(lack: int, taken_count: int | None, chunk_tokens: int) -> int:
    may_bring = CALL_TOKENS if taken_count is None else max(chunk_tokens, taken_count, DECODED_TOKENS)
    return min(lack, CALL_TOKENS, may_bring)
