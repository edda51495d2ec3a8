"""Reads the arguments of calls as objects, for APIs that do not send them as text."""

import json
import re
from itertools import islice
from typing import Any

import msgspec

UNREADABLE = "INVALID_JSON"
"""The only member of an input that could not be read; it holds the text (the name is that of Anthropic's guide)."""
_TOKENS = re.compile(
    r"""
    (?P<text>"(?:\\.|[^"\\])*+")
  | (?P<quoted>'(?:\\.|[^'\\])*+')
  | ["'][\s\S]*                            # it does not end: looked for again at each mark, that was quadratic
  | (?P<comma>,)(?=\s*[}\]])
  | (?P<name>[A-Za-z_$][\w$]*+)(?=\s*:)
  | (?P<value>[+-]?[\w.$][\w.$+-]*+)
  | \s+
  | [\s\S]
    """,
    re.X | re.S,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_MAX_TOKENS = 20_000
"""Tokens of malformed arguments that are read, some 20 ms of the event loop; texts of any length are one token."""
_EXTENT = re.compile(r'"(?:\\.|[^"\\])*+("?)|[{}\[\]]', re.S)
_WITHIN_QUOTES = re.compile(r"""\\(.)|\"""", re.S)
_WRONG_ESCAPE = re.compile(r"""\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|.)""", re.S)


def read_arguments(text: str, *, is_cut: bool) -> dict[str, Any]:
    """Return a call's arguments.

    Malformed JSON is read as what it must mean: line breaks in texts, trailing commas, Python's spelling, numbers that
    JSON has not (as texts). Of other texts nothing is guessed: they stand whole in ``INVALID_JSON``, the only member.

    ``is_cut``: the finish reason says that the output was cut; arguments within which it ended are empty then. Without
    that word a client would run its tool with the empty input.
    """
    arguments = _decoded(text)
    if arguments is None:
        arguments = _decoded(_mended(text) or "")
    if arguments is not None:
        return arguments
    is_told = is_cut and not _is_complete(text)
    return {} if is_told or not text.strip() else {UNREADABLE: text}


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
    """Return whether the value with which a text begins ends in it."""
    text = text.strip()
    if not text.startswith(('"', "{", "[")):
        return bool(text)
    depth = 0
    for found in _EXTENT.finditer(text):
        mark = found[0]
        if mark[0] == '"' and not found[1]:
            return False
        depth += (mark in ("{", "[")) - (mark in ("}", "]"))
        if not depth:
            return True
    return False


def _mended(text: str) -> str | None:
    """Return a text with its tokens as JSON spells them; None if there are too many."""
    tokens = [_token(found) for found in islice(_TOKENS.finditer(text), _MAX_TOKENS + 1)]
    return "".join(tokens) if len(tokens) <= _MAX_TOKENS else None


def _token(found: re.Match[str]) -> str:
    """Return a token as JSON spells it."""
    token = found.group()
    match found.lastgroup:
        case "text":
            return _string(token[1:-1])
        case "quoted":
            return _string(_WITHIN_QUOTES.sub(_in_quotes, token[1:-1]))
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


def _in_quotes(found: re.Match[str]) -> str:
    """Return an escape, or a quotation mark, of a text in single quotes as JSON spells it."""
    return "'" if found[1] == "'" else found[0] if found[1] else r"\""


def _escape(found: re.Match[str]) -> str:
    if found[1]:
        return found[0]
    return "'" if found[0] == r"\'" else "\\" + found[0]


def _value(token: str) -> str:
    """Return a number or word; as a text if JSON has no such number. A name that stands for a value stays."""
    if "$" in token:
        return token
    try:
        msgspec.json.decode(token)
    except msgspec.DecodeError:
        return json.dumps(token)
    return token
