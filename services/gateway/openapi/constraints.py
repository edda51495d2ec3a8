"""Holds JSON schemas of request bodies that types of fields cannot express."""

from collections.abc import Mapping
from typing import Any

INTEGER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
INTEGER_OR_FALSE = {"anyOf": [{"type": "integer"}, {"const": False}, {"type": "null"}]}

_TOKEN_ID = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32}
PROMPT: Mapping[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": _TOKEN_ID, "minItems": 1},
            "minItems": 1,
        },
        {"type": "null"},
    ]
}
_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                ]
            },
        },
    ]
}
_CALL = {
    "type": "object",
    "properties": {
        "id": _TEXT_OR_NULL,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "arguments": {
                    "anyOf": [{"type": "object"}, {"type": "string", "contentMediaType": "application/json"}]
                },
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
TURN: Mapping[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": _CONTENT,
                "name": _TEXT_OR_NULL,
                "tool_call_id": _TEXT_OR_NULL,
            },
            "required": ["role", "content"],
        },
        {
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [_CONTENT, {"type": "array", "maxItems": 0}, {"type": "null"}]},
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
                "reasoning_content": _TEXT_OR_NULL,
            },
            "required": ["role", "tool_calls"],
        },
    ],
}
TOOL: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": _TEXT_OR_NULL,
                "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
TOOL_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}


def _given(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


NO_EMBEDS: Mapping[str, Any] = {
    "type": "null",
    "description": "Not available: no engine accepts embeddings (--enable-prompt-embeds).",
}
"""Describes ``prompt_embeds`` if no engine accepts embeddings."""


REQUIRED: Mapping[str, str] = {
    "ClassifyRequest": "input",
    "DetokenizeRequest": "tokens",
    "EmbeddingRequest": "input",
    "PoolingRequest": "input",
}
"""Fields without which a body is refused, though their types have a default."""
# Not an enum of false and null: generators of clients make types of enums, and cannot of this one.
_OF_CHATS: dict[str, Any] = {"add_special_tokens": {"not": {"const": True}}}


def of_bodies(*, embeds: bool) -> Mapping[str, Mapping[str, Any]]:
    """Return, by the name of the body, rules about several of its fields. ``embeds``: engines accept embeddings."""
    prompt = {"anyOf": [_given("prompt"), _given("prompt_embeds")]} if embeds else _given("prompt")
    chat = _given("messages")
    chat["properties"] |= _OF_CHATS
    return {
        "ChatCompletionRequest": {"properties": _OF_CHATS},
        "CompletionRequest": prompt,
        "TokenizeRequest": {"oneOf": [_given("prompt"), chat]},
    }
