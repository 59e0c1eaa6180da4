"""What a request's span tells: what was asked, by the conventions for generative AI, and what came of it.

Never the prompt, its tokens or the output's.
"""

from collections.abc import Sequence as Sequences

from opentelemetry import context, trace

from coordinator.sequence import Sequence
from coordinator.traced_request import TracedRequest
from paceline.types import GenerationRequest, UserMessage


def begin_request(request: GenerationRequest, sequences: Sequences[Sequence], model_id: str) -> None:
    """Describe the request in its call's span, which is the current one, and let its sequences know it."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    sampling = request.sampling
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if isinstance(request.prompt, UserMessage) else "text_completion",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model_id,
            "gen_ai.request.stream": True,
            "gen_ai.request.choice.count": request.completion_count,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.usage.input_tokens": sequences[0].usage.prompt_count,
        }
    )
    if request.max_new_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", request.max_new_tokens)
    traced = TracedRequest.of(context.get_current())
    for sequence in sequences:
        sequence.traced = traced


def end_request(sequences: Sequences[Sequence]) -> None:
    """Add to the request's span what its outputs came to, ended or not. One that was refused has no sequences."""
    traced = sequences[0].traced if sequences else None
    if traced is None:
        return
    span = traced.span
    usages = [sequence.usage for sequence in sequences]
    reasons = [sequence.output.finish_reason for sequence in sequences]
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": sum(usage.output_count for usage in usages),
            "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason],
            "paceline.drafted_count": sum(usage.drafted_count for usage in usages),
            "paceline.accepted_count": sum(usage.accepted_count for usage in usages),
            "paceline.round_count": sum(usage.round_count for usage in usages),
        }
    )
    for round_span in traced.rounds:
        span.add_link(round_span)
