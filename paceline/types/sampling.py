"""The values that a choice of a token depends on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Parameters of the choice of tokens; the defaults are greedy."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples the model's own distribution."""
    top_k: int = 0
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the likeliest tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once, with the values added to their logits."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of prompt and output less likely."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it occurs in the output."""
    min_new_tokens: int = 0
    """Tokens of output before which no end token is chosen."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Everything that a choice depends on besides the logits and the tokens before it."""

    sampling: SamplingParameters = SamplingParameters()
    seed: int = 0
    """64 bits."""
    prompt_count: int = 0
    """Leading tokens of the sequence that are not output: penalties and `min_new_tokens` count from there."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that `min_new_tokens` rules out."""


GREEDY = ChoiceRule()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the target itself, before any sampling parameter."""

    logprob: float
    """Log-probability of the chosen token."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""
