"""Defines the request bodies of Anthropic's Messages API.

Sampling parameters are read by their table, as in the other bodies; content blocks by the code that translates them.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the tokens of a conversation."""

    messages: Annotated[
        list[dict[str, Any]],
        Meta(
            description="Turns of user and assistant. Content: text, or blocks: text, tool_use, tool_result, thinking, "
            "and documents of plain text."
        ),
    ]
    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    system: Annotated[str | list[dict[str, Any]] | None, Meta(description="Instructions, before all turns.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, Meta(description="Custom tools: name, description and input_schema.")
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "auto" | "any" | "none"}, or {"type": "tool", "name": …}.'),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        Meta(description='{"type": "enabled", "budget_tokens": …}, adaptive or disabled; null: it is not returned.'),
    ] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """Answers in a conversation, in Anthropic's form."""

    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stop_sequences: Annotated[list[str] | None, Meta(description="Texts that end the answer; up to 16.")] = None
    output_config: Annotated[
        dict[str, Any] | None,
        Meta(description='{"format": {"type": "json_schema", "schema": …}}; effort: a variable of the chat template.'),
    ] = None
    output_format: Annotated[dict[str, Any] | None, Meta(description="Older name of output_config.format.")] = None


class MessageErrorObject(msgspec.Struct):
    """What went wrong, in Anthropic's form."""

    type: Annotated[str, Meta(description="Kind of error: invalid_request_error, overloaded_error, …")]
    message: Annotated[str, Meta(description="What was wrong, where, and what would be right.")]


class MessageErrorResponse(msgspec.Struct):
    """An error in Anthropic's form."""

    type: Annotated[Literal["error"], Meta(description="The kind of this object.")]
    error: Annotated[MessageErrorObject, Meta(description="What went wrong.")]
