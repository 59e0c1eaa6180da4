"""Fields of OpenAI's, vLLM's and SGLang's bodies that would change an answer and are not served.

They are refused, except for values that change nothing: a client that gave them would take the answer for another.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel


def _only(*harmless: object, instead: str = "leave it out") -> Callable[[object], object]:
    """Return a check that refuses all but values that change nothing."""

    def refuse(value: object) -> object:
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise ValueError(f"is not supported; {instead}")
        return value

    return refuse


BY_TEMPLATE = "give it in chat_template_kwargs"
Unsupported = Annotated[Any, AfterValidator(_only())]
OnlyFalse = Annotated[Any, AfterValidator(_only(False))]
OnlyTrue = Annotated[Any, AfterValidator(_only(True))]


class RefusedFields(BaseModel):
    """Those of both kinds of requests."""

    # vLLM's.
    allowed_token_ids: Unsupported = None
    bad_words: Annotated[Any, AfterValidator(_only([]))] = None
    cache_salt: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    guided_json: Unsupported = None
    include_stop_str_in_output: OnlyFalse = None
    logits_processors: Unsupported = None
    logprob_token_ids: Unsupported = None
    priority: Annotated[Any, AfterValidator(_only(0))] = None
    prompt_logprobs: Unsupported = None
    repetition_detection: Unsupported = None
    return_tokens_as_token_ids: OnlyFalse = None
    skip_special_tokens: OnlyTrue = None
    thinking_token_budget: Annotated[Any, AfterValidator(_only(-1))] = None
    truncate_prompt_tokens: Unsupported = None
    use_beam_search: OnlyFalse = None
    vllm_xargs: Annotated[Any, AfterValidator(_only({}))] = None
    watermarking: OnlyFalse = None
    # SGLang's.
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    ebnf: Unsupported = None
    json_schema: Unsupported = None
    lora_path: Unsupported = None
    no_stop_trim: OnlyFalse = None
    regex: Annotated[Any, AfterValidator(_only(instead="give it as structured_outputs.regex"))] = None
    return_hidden_states: OnlyFalse = None
    session_params: Unsupported = None
    stop_regex: Unsupported = None


class RefusedChatFields(BaseModel):
    """Those of chats."""

    add_generation_prompt: Annotated[Any, AfterValidator(_only(True, instead=BY_TEMPLATE))] = None
    add_special_tokens: OnlyFalse = None
    audio: Unsupported = None
    chat_template: Unsupported = None
    continue_final_message: Annotated[Any, AfterValidator(_only(False, instead=BY_TEMPLATE))] = None
    documents: Annotated[Any, AfterValidator(_only([], instead=BY_TEMPLATE))] = None
    echo: OnlyFalse = None
    function_call: Unsupported = None
    functions: Unsupported = None
    include_reasoning: OnlyTrue = None
    input_ids: Unsupported = None
    modalities: Annotated[Any, AfterValidator(_only(["text"]))] = None
    moderation: Unsupported = None
    return_prompt_text: OnlyFalse = None
    verbosity: Annotated[Any, AfterValidator(_only("medium"))] = None
    web_search_options: Unsupported = None


class RefusedCompletionFields(BaseModel):
    """Those of completions."""

    add_special_tokens: OnlyTrue = None
    prompt_embeds: Unsupported = None
    suffix: Annotated[Any, AfterValidator(_only(""))] = None
