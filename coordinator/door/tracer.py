"""Attributes of a request's span: what was asked, by the conventions for generative AI, and its result.

Never the prompt, its tokens or the output's.
"""

from opentelemetry import context, trace

from coordinator.requests.generation import Request
from coordinator.requests.traced_request import TracedRequest
from paceline.types import GenerationRequest, UserMessage


def begin_request(asked: GenerationRequest, request: Request, model_id: str) -> None:
    """Describe the request in its call's span, which is the current one, and store the span in the request."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    sampling = asked.sampling
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if isinstance(asked.prompt, UserMessage) else "text_completion",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model_id,
            "gen_ai.request.stream": True,
            "gen_ai.request.choice.count": asked.completion_count,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.usage.input_tokens": request.prompt_count,
        }
    )
    if asked.max_new_tokens is not None:
        span.set_attribute("gen_ai.request.max_tokens", asked.max_new_tokens)
    request.traced = TracedRequest.of(context.get_current())


def end_request(request: Request) -> None:
    """Add the counts of the request's outputs to its span, ended or not."""
    if request.traced is None:
        return
    span = request.traced.span
    usages = [generation.usage for generation in request.generations]
    reasons = [generation.output.finish_reason for generation in request.generations]
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": sum(usage.output_count for usage in usages),
            "gen_ai.response.finish_reasons": [reason.value for reason in reasons if reason],
            "paceline.drafted_count": sum(usage.drafted_count for usage in usages),
            "paceline.accepted_count": sum(usage.accepted_count for usage in usages),
            "paceline.round_count": sum(usage.round_count for usage in usages),
        }
    )
    for round_span in request.traced.rounds:
        span.add_link(round_span)
