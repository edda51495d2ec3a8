"""Reads the arguments of calls as objects, for APIs that do not send them as text."""

import json
import re
from typing import Any

import msgspec

from .call_object import JsonExtent

UNREADABLE = "INVALID_JSON"
"""The only member of an input that could not be read; it holds the text (the name is that of Anthropic's guide)."""
_TOKENS = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\])*")
  | (?P<quoted>'(?:\\.|[^'\\])*')
  | (?P<comma>,)(?=\s*[}\]])
  | (?P<name>[A-Za-z_$][\w$]*)(?=\s*:)
  | (?P<value>[+-]?[\w.][\w.+-]*)
  | [\s\S]
    """,
    re.X | re.S,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_WRONG_ESCAPE = re.compile(r"""\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|.)""", re.S)


def read_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments.

    Malformed JSON is read as what it must mean: line breaks in texts, trailing commas, Python's spelling, numbers that
    JSON has not (as texts). Of other complete texts nothing is guessed: they stand whole in ``INVALID_JSON``, the only
    member. Empty if the output ended within the arguments, which its finish reason says.
    """
    arguments = _decoded(text)
    if arguments is None:
        arguments = _decoded(_mended(text))
    if arguments is not None:
        return arguments
    return {UNREADABLE: text} if _is_complete(text) else {}


def raw_arguments(arguments: dict[str, Any]) -> dict[str, Any] | str:
    """Return the arguments of a past call as the model wrote them: as a text if they could not be read."""
    text = arguments.get(UNREADABLE)
    return text if isinstance(text, str) and len(arguments) == 1 else arguments


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _is_complete(text: str) -> bool:
    text = text.strip()
    extent = JsonExtent()
    for char in text:
        if extent.ended or not extent.takes(char):
            return True
    return extent.ended or text[:1] not in ('"', "{", "[", "")


def _mended(text: str) -> str:
    return _TOKENS.sub(_token, text)


def _token(found: re.Match[str]) -> str:
    """Return a token as JSON spells it."""
    token = found.group()
    match found.lastgroup:
        case "text":
            return _string(token[1:-1])
        case "quoted":
            return _string(token[1:-1].replace(r"\'", "'").replace('"', r"\""))
        case "comma":
            return ""
        case "name":
            return f'"{token}"'
        case "value":
            return _value(_WORDS.get(token, token))
    return token


def _string(inner: str) -> str:
    """Return a JSON string with the escapes that are missing; half a surrogate pair becomes a question mark."""
    escaped = _WRONG_ESCAPE.sub(_escape, inner)
    value = json.loads(f'"{escaped}"', strict=False)
    return json.dumps(value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))


def _escape(found: re.Match[str]) -> str:
    if found[1]:
        return found[0]
    return "'" if found[0] == r"\'" else "\\" + found[0]


def _value(token: str) -> str:
    """Return a number or word; as a text if JSON has no such number."""
    try:
        msgspec.json.decode(token)
    except msgspec.DecodeError:
        return json.dumps(token)
    return token
