"""The values that a choice of a token depends on."""

from dataclasses import dataclass, field
from typing import TypeVar

Number = TypeVar("Number", int, float)


def _flag(default: Number, help: str) -> Number:
    """A parameter that is a flag of commands too, with this help."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Parameters of the choice of tokens; the defaults are greedy. Wire and commands use these names."""

    temperature: float = _flag(0.0, "0: the likeliest token; 1: the model's own distribution.")
    top_k: int = _flag(0, "Only the k likeliest tokens; 0: all.")
    top_p: float = _flag(1.0, "Only the likeliest tokens that reach this probability together.")
    min_p: float = _flag(0.0, "Only tokens at least this share as likely as the likeliest.")
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once, with the values added to their logits."""
    repetition_penalty: float = _flag(1.0, "Over 1: tokens of prompt and output become less likely.")
    presence_penalty: float = _flag(0.0, "Taken from the logits of tokens of the output.")
    frequency_penalty: float = _flag(0.0, "Taken from them for each time they occur there.")
    min_new_tokens: int = _flag(0, "No end token before so many tokens.")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What an output must look like; exactly one of the fields is set."""

    json_schema: str = ""
    """A JSON Schema, as JSON text."""
    regex: str = ""
    grammar: str = ""
    """A context-free grammar in Lark's notation."""


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Everything that a choice depends on besides the logits and the tokens before it."""

    sampling: SamplingParameters = SamplingParameters()
    seed: int = 0
    """64 bits."""
    prompt_count: int = 0
    """Leading tokens of the sequence that are not output: penalties and `min_new_tokens` count from there."""
    end_token_ids: tuple[int, ...] = ()
    """Tokens that `min_new_tokens` rules out, and that end a formatted output."""
    response_format: ResponseFormat | None = None


GREEDY = ChoiceRule()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the target itself, before any sampling parameter."""

    logprob: float
    """Log-probability of the chosen token."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""
