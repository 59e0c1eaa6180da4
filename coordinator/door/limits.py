"""Limits on one request that are lower than what the model allows."""

from dataclasses import dataclass

from paceline.errors import InvalidRequest, PromptTooLong
from paceline.types import GenerationRequest

MAX_COMPLETIONS = 64
MAX_REQUEST_BYTES = 8 << 20
"""Bytes of a message: gRPC copies it while the event loop waits, 1 ms or more a MB. A million token ids are 3 MB."""


@dataclass(frozen=True)
class RequestLimits:
    max_prompt_tokens: int | None = None
    """None: as many as the model takes."""
    max_output_tokens: int | None = None
    max_completions: int = MAX_COMPLETIONS
    max_together: int | None = None
    """Most outputs that a target and its queue ever have room for at once: a request's outputs are queued together."""

    def check(self, request: GenerationRequest) -> None:
        """Raise InvalidRequest, naming field and limit, when the request asks for too much output."""
        if not 1 <= request.completion_count <= self.max_completions:
            raise InvalidRequest(
                f"completion_count is {request.completion_count}; give 1 to {self.max_completions}",
                field="completion_count",
            )
        if self.max_together is not None and request.completion_count > self.max_together:
            raise InvalidRequest(
                f"completion_count is {request.completion_count}; a target and its queue here have room for "
                f"{self.max_together} outputs (--batch-size, --lanes, --queue-limit), so ask for fewer in one request",
                field="completion_count",
            )
        if self.max_output_tokens is not None and (request.max_new_tokens or 0) > self.max_output_tokens:
            raise InvalidRequest(
                f"max_new_tokens is {request.max_new_tokens}; at most {self.max_output_tokens} are given here "
                "(--max-output-tokens)",
                field="max_new_tokens",
            )

    def check_prompt(self, prompt_count: int) -> None:
        """Raise InvalidRequest, naming field and limit, when the prompt has too many tokens."""
        if self.max_prompt_tokens is not None and prompt_count > self.max_prompt_tokens:
            raise PromptTooLong(
                f"prompt is too long: it has {prompt_count} tokens; at most {self.max_prompt_tokens} are taken here "
                "(--max-prompt-tokens)",
                field="prompt",
            )

    def default_output_tokens(self, wanted: int) -> int:
        """Return the output limit of a request that names none."""
        return wanted if self.max_output_tokens is None else min(wanted, self.max_output_tokens)


NO_LIMITS = RequestLimits()
