"""What the API's description says of bodies beyond the types of their fields, as JSON schema."""

from collections.abc import Mapping
from typing import Any

INTEGER_OR_FALSE = {"anyOf": [{"type": "integer"}, {"const": False}, {"type": "null"}]}

PROMPT: Mapping[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
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
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
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
                "content": {"anyOf": [_CONTENT, {"type": "null"}]},
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
                "reasoning_content": _TEXT_OR_NULL,
            },
            "required": ["role", "tool_calls"],
        },
    ]
}


def _given(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


OF_BODIES: Mapping[str, Mapping[str, Any]] = {
    "CompletionRequest": {"anyOf": [_given("prompt"), _given("prompt_embeds")]},
    "TokenizeRequest": {"oneOf": [_given("prompt"), _given("messages")]},
}
"""By name: fields of which one must be there."""
