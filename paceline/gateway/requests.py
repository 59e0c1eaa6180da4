"""From a body to the requests that coordinators get, one for each prompt."""

import secrets
from dataclasses import replace

from paceline.checks import MIN_TEMPERATURE
from paceline.gateway.bodies import ChatBody, CompletionBody, GenerationBody, Json, Message, PacelineOptions
from paceline.gateway.errors import invalid
from paceline.gateway.formats import as_json, format_field, response_format_of
from paceline.gateway.tool_calls import ToolFormat
from paceline.types import (
    Chat,
    ChatMessage,
    DraftingOptions,
    DraftSource,
    GenerationRequest,
    Prediction,
    Prompt,
    SamplingParameters,
    Text,
    TokenIds,
    ToolCall,
)

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request sets no limit, as OpenAI's and vLLM's."""
ROLES = {"developer": "system"}
"""Roles that chat templates know by another name."""
MAX_REPEATED_CHARACTERS = 8 << 20
"""Most characters of formats and predictions that are sent once for each prompt of a body, all together."""
LEAST_TOP_P = 1e-9
"""Stands for 0, which coordinators refuse: the likeliest token of any vocabulary has more, so it alone is left."""
SEED_BITS = 53
"""Of seeds that are drawn here: JavaScript reads larger numbers wrongly."""


def chat_requests(body: ChatBody, tool_format: ToolFormat) -> list[GenerationRequest]:
    request = _request(body, conversation_of(body), tool_format)
    top_count = (body.top_logprobs or 0) if body.logprobs else None
    return [replace(request, max_new_tokens=body.token_limit, top_logprob_count=top_count)]


def completion_requests(body: CompletionBody, tool_format: ToolFormat) -> list[GenerationRequest]:
    request = _request(body, Text(""), tool_format)
    _check_repeated(request, len(body.prompt))
    limit = COMPLETION_TOKENS if body.token_limit is None else body.token_limit
    request = replace(
        request,
        # A coordinator makes a token at least; where only the prompt is asked for, it is not shown.
        max_new_tokens=max(1, limit),
        top_logprob_count=body.logprobs,
        echo_prompt=bool(body.echo),
    )
    return [replace(request, prompt=Text(one) if isinstance(one, str) else TokenIds(one)) for one in body.prompt]


def _check_repeated(request: GenerationRequest, prompt_count: int) -> None:
    """Raise HttpError where a body's other texts become far more than the body by going with each of its prompts."""
    form, predicted = request.response_format, request.predicted_output
    lengths = {
        "response_format": len(form.json_schema + form.regex + form.grammar) if form else 0,
        "prediction": len(predicted.value) if isinstance(predicted, Text) else 0,
    }
    for field, length in lengths.items():
        if prompt_count > 1 and prompt_count * length > MAX_REPEATED_CHARACTERS:
            raise invalid(
                f"{field} has {length} characters and goes with each of {prompt_count} prompts, which may be "
                f"{MAX_REPEATED_CHARACTERS} together; give it fewer prompts",
                field,
            )


def _request(body: GenerationBody, prompt: Prompt, tool_format: ToolFormat) -> GenerationRequest:
    ours = body.paceline or PacelineOptions()
    return GenerationRequest(
        prompt,
        stop_strings=body.stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_end_tokens=bool(body.ignore_eos),
        max_draft_count=ours.max_draft_count,
        sampling=_sampling(body),
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed % (1 << 64),
        completion_count=body.output_count,
        drafting=DraftingOptions(
            tuple(map(DraftSource, ours.sources or ())),
            bool(ours.in_order),
            tuple(map(DraftSource, ours.forbidden_sources or ())),
            ours.draft_model or "",
        ),
        predicted_output=_prediction(body),
        response_format=response_format_of(body, tool_format),
        tell_rounds=body.tells,
    )


def own_names(body: GenerationBody) -> dict[str, str]:
    """Return the names that a body has for its format and its limits, by those that errors have for them."""
    names = {"response_format": format_field(body)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if isinstance(body, CompletionBody):
        names["top_logprobs"] = "logprobs"
    return names


def _sampling(body: GenerationBody) -> SamplingParameters:
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParameters(
        # A lower one is as good as none, and clients mean that by it.
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=max(0, body.top_k or 0),  # vLLM's -1 means all, too
        top_p=1.0 if body.top_p is None else max(body.top_p, LEAST_TOP_P),
        min_p=body.min_p or 0.0,
        logit_bias=body.logit_bias,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        min_new_tokens=body.min_tokens or 0,
    )


def _prediction(body: GenerationBody) -> Prediction | None:
    return Text(body.prediction.content) if body.prediction and body.prediction.content else None


def conversation_of(body: ChatBody) -> Chat:
    """Return a body's messages, with the tools that may be called. Raise HttpError that names a wrong message."""
    messages = tuple(_message(one, f"messages[{index}]") for index, one in enumerate(body.messages))
    # Tools that may not be called are not shown to the model.
    tools = tuple(as_json(one, "tools") for one in body.tools or () if body.calls_tools)
    variables = _template_variables(body)
    arguments = as_json(variables, "chat_template_kwargs") if variables else ""
    return Chat(messages, tools, arguments)


def _template_variables(body: ChatBody) -> Json:
    """Return the template's further variables. An effort becomes those that vLLM makes of it."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    return {"enable_thinking": effort != "none"} | given | {"reasoning_effort": effort} if effort else given


def _message(message: Message, place: str) -> ChatMessage:
    if message.content is None and not message.tool_calls:
        raise invalid(f"{place}.content is missing; give text", f"{place}.content")
    calls = tuple(ToolCall(one.id, one.function.name, one.function.arguments) for one in message.tool_calls or ())
    return ChatMessage(
        ROLES.get(message.role, message.role),
        message.content or "",
        message.name or "",
        calls,
        message.tool_call_id or "",
    )
