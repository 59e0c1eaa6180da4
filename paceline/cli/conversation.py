"""`--messages` and `--tools`: a conversation from files, of the same form and by the same checks as the gateway's."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import read_text, with_flags
from paceline.errors import InvalidRequest
from paceline.gateway.bodies import ChatBody
from paceline.gateway.errors import HttpError
from paceline.gateway.reading import parse
from paceline.gateway.requests import conversation_of
from paceline.types import Chat


@dataclass(frozen=True)
class ConversationFlags:
    """Flags that give a conversation instead of a prompt."""

    messages: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON list of messages, as of OpenAI's chats, in place of the prompt; -: standard input. "
            "Unset: none."
        ),
    ] = None
    tools: Annotated[
        Path | None,
        typer.Option(help="File with a JSON list of tools, which the template shows with --messages. Unset: none."),
    ] = None

    def prompt(self, prompt: str | None, chat: bool | None) -> Chat | str:
        """Return the conversation, or the prompt. Raise InvalidRequest unless there is one of them, and it is right."""
        if (prompt is None) == (self.messages is None):
            count = "neither is" if prompt is None else "both are"
            raise InvalidRequest(f"PROMPT or --messages is needed, and {count} given; give one", field="messages")
        if self.messages is None:
            if self.tools:
                raise InvalidRequest("--tools needs --messages; give the prompt as a message there", field="tools")
            assert prompt is not None
            return prompt
        if chat is False:
            raise InvalidRequest("--raw has no template for --messages; leave one of them out", field="messages")
        body = {"messages": _json("messages", self.messages), "tools": self.tools and _json("tools", self.tools)}
        try:
            return conversation_of(parse(json.dumps(body).encode(), ChatBody))
        except HttpError as error:
            field = "tools" if (error.param or "").startswith("tools") else "messages"
            raise InvalidRequest(f"--{field}: {error.message}", field=field) from error


def _json(field: str, path: Path) -> Any:
    try:
        return json.loads(read_text(field, path))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--{field} {path} is no JSON: {error}", field=field) from error


with_conversation_flags = with_flags("conversation", ConversationFlags, ConversationFlags)
