"""The cost of prompts, in rounds with drafts and without: with drafts each prompt is computed twice.

Owns the seconds beyond those of a usual round, in whichever round they fall: a prompt delays the rounds of other lanes
too, and the draft service catches up later.
"""

from dataclasses import dataclass

PROMPT_MEMORY = 0.998
"""Weight of earlier rounds after one more."""
PRIOR_TOKENS = 300.0
"""Weight of the mean of both ways of decoding in the estimate of one of them, in prompt tokens."""


@dataclass
class _Sum:
    seconds: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, beyond_s: float, prompt_tokens: float) -> None:
        self.seconds = PROMPT_MEMORY * self.seconds + beyond_s
        self.prompt_tokens = PROMPT_MEMORY * self.prompt_tokens + prompt_tokens


class PromptTimes:
    """Prompt costs in groups of about one size."""

    def __init__(self) -> None:
        self._sums = {False: _Sum(), True: _Sum()}
        """Sums by whether the rounds had drafts. Each forgets only as it learns: one way may be out of use for long."""
        self._prompt_tokens = self._tokens = 0.0

    def add(self, *, drafted: bool, beyond_s: float, prompt_tokens: float, tokens: float) -> None:
        """Learn from a round: its seconds beyond a usual one, and its prompt tokens and committed tokens a row."""
        if beyond_s or prompt_tokens:
            self._sums[drafted].add(beyond_s, prompt_tokens)
        self._prompt_tokens = self._prompt_tokens * PROMPT_MEMORY + prompt_tokens
        self._tokens = self._tokens * PROMPT_MEMORY + tokens

    @property
    def are_known(self) -> bool:
        """Whether any prompt was seen."""
        return self._prompt_tokens > 0

    def token_s(self, *, drafted: bool) -> float:
        """Return the seconds that prompts cost for each committed token of a row."""
        every = self._sums.values()
        prompt_tokens = sum(one.prompt_tokens for one in every)
        if not (prompt_tokens and self._tokens):
            return 0.0
        usual_s = sum(one.seconds for one in every) / prompt_tokens
        own = self._sums[drafted]
        prompt_token_s = (own.seconds + usual_s * PRIOR_TOKENS) / (own.prompt_tokens + PRIOR_TOKENS)
        return max(0.0, prompt_token_s) * self._prompt_tokens / self._tokens
