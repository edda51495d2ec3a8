"""Defines the request body of OpenAI's Responses API.

Sampling parameters are read by their table, as in the other bodies; items by the code that translates them.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in a conversation, which the gateway may keep for the next request."""

    input: Annotated[
        str | list[dict[str, Any]],
        Meta(description="A text, or items: message, reasoning, function_call, function_call_output."),
    ]
    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    instructions: Annotated[str | None, Meta(description="A system turn before all others.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Continue the conversation of this stored response of the same gateway.")
    ] = None
    store: Annotated[bool | None, Meta(description="Keep the response for a later request (default).")] = None
    background: Annotated[bool | None, Meta(description="Answer at once; the client asks for the response later.")] = (
        None
    )
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    max_output_tokens: Annotated[int | None, Meta(description="Limit of the output, reasoning included.")] = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        Meta(description='"none", "auto", "required", or an object of type function or allowed_tools.'),
    ] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="Whether several calls may be made (default).")] = None
    reasoning: Annotated[dict[str, Any] | None, Meta(description='{"effort": …}, for the chat template.')] = None
    text: Annotated[
        dict[str, Any] | None, Meta(description='{"format": {"type": "text" | "json_object" | "json_schema", …}}.')
    ] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Returned as it is.")] = None
    include: Annotated[list[str] | None, Meta(description="Further parts of the response; they have no effect.")] = None
    truncation: Annotated[str | None, Meta(description="Only disabled.")] = None
    top_logprobs: Annotated[int | None, Meta(description="Only 0.")] = None
    max_tool_calls: Annotated[int | None, Meta(description="Limits built-in tools, of which there are none.")] = None
    stream_options: Annotated[dict[str, Any] | None, Meta(description="Have no effect.")] = None
    conversation: Annotated[Any, Meta(description="Only null: use previous_response_id.")] = None
    prompt: Annotated[Any, Meta(description="Only null: templates of prompts are not stored.")] = None
