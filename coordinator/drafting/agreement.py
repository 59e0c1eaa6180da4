"""The guess that earlier places lead to: a vote among those that match about equally well, token by token.

The votes are what SuffixDecoding (Oliaro et al., arXiv 2411.04975) keeps as counts in the nodes of a suffix tree.
"""

from operator import itemgetter

from coordinator.drafting.indexed_text import Match
from coordinator.requests.guess import Guess

MOST_VOTES = 4
NEAR = 0.5
"""Places vote whose match is at least this share of the longest."""

_match_length = itemgetter(0)


def guess_of(matches: list[Match], most: int) -> Guess | None:
    """Return at most `most` tokens that followed the longest matches; of equal ones the first win. None without any."""
    if not matches or most < 1:
        return None
    if len(matches) == 1:
        longest, text, place = matches[0]
        followers = text.after(place, most)
        return Guess(tuple(followers), longest, (1.0,) * len(followers)) if followers else None
    matches.sort(key=_match_length, reverse=True)
    longest = matches[0][0]
    least = NEAR * longest
    votes = [text.after(place, most) for length, text, place in matches[:MOST_VOTES] if length >= least]
    token_ids, shares = _agreed(votes)
    return Guess(tuple(token_ids), longest, tuple(shares)) if token_ids else None


def _agreed(votes: list[list[int]]) -> tuple[list[int], list[float]]:
    """Return the tokens that most votes go on with, and their shares. Each token counts the votes for all before it.

    Of equally many votes the first ones win.
    """
    shares: list[float] = []
    # Where the least and the greatest vote agree, all do.
    while (least := min(votes)) != (greatest := max(votes)):
        count = 0
        for one, other in zip(least, greatest, strict=False):
            if one != other:
                break
            count += 1
        shares += [1.0] * (count - len(shares))
        votes = [vote for vote in votes if len(vote) > count]
        nexts = [vote[count] for vote in votes]
        token_id = max(nexts, key=nexts.count)
        shares.append(nexts.count(token_id) / len(nexts))
        votes = [vote for vote in votes if vote[count] == token_id]
    return least, shares + [1.0] * (len(least) - len(shares))
