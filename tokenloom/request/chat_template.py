"""Reads a chat template that a user names, a file or Jinja itself, and what templates take as arguments of calls."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.process.plugins import check_choice, load

from .errors import InvalidArgument

FIELD = "chat_template"
MAX_TEMPLATE_BYTES = 1 << 20
"""Ten times the longest template of a known model."""
_OF_JINJA = "{}\n"


def read_chat_template(given: str, plugins: Sequence[str] = ()) -> str:
    """Return the template's text.

    ``given``: the path of a file, or the template itself, which contains a brace or a line break as in vLLM, or a
    plugin of one of the packages ``plugins``, as ``PACKAGE:NAME``. A file of that name takes precedence. Raises
    ``InvalidArgument`` for a file or a plugin that cannot be read.
    """
    path = Path(os.path.expanduser(given))
    try:
        if path.is_file():
            return _read(path)
    except (OSError, ValueError):  # a name that no file can have
        pass
    if any(char in given for char in _OF_JINJA):
        return given
    if ":" in given:
        return _plugged(given, plugins)
    raise InvalidArgument(
        f"chat template: no such file: {given!r}; name a file, or give a template, which contains {{{{ or {{%", FIELD
    )


def past_arguments(arguments: object) -> dict[str, Any] | str:
    """Return the arguments of a past call as an object, which each template writes in its own way; as text if they are
    none. OpenAI's API sends JSON in a string; an object is accepted too."""
    # Not refused: the model wrote them, and an answer that was cut or malformed would end the conversation.
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        return {} if arguments is None else msgspec.json.encode(arguments).decode()
    try:
        # Strict: of NaN or half a surrogate pair, a lenient reader would make what cannot be written again.
        value = msgspec.json.decode(arguments or b"{}")
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return arguments
    return value if isinstance(value, dict) else arguments


def check_chat_template(given: str) -> str:
    """Return ``given``, or raise ``ValueError`` if no template can be read there."""
    if given:
        try:
            if names_plugin(given):
                return check_choice("chat_templates", (), given)
            read_chat_template(given)
        except InvalidArgument as error:
            raise ValueError(error.message.removeprefix("chat template: ")) from None
    return given


def names_plugin(given: str) -> bool:
    """Return whether this is the name of a plugin, and neither a template nor a file."""
    return ":" in given and not any(char in given for char in _OF_JINJA) and not os.path.exists(given)


def _plugged(named: str, plugins: Sequence[str]) -> str:
    try:
        text = load("chat_templates", named, plugins)
        if not isinstance(text, str) or len(text.encode()) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"the plugin {named} (chat_templates) is no text of at most {MAX_TEMPLATE_BYTES} bytes")
    except ValueError as error:
        raise InvalidArgument(f"chat template: {error}", FIELD) from None
    return text


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise InvalidArgument(f"chat template: {path} has more than {MAX_TEMPLATE_BYTES} bytes", FIELD)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(f"chat template: {path} is not UTF-8 text", FIELD) from None
    except OSError as error:
        raise InvalidArgument(f"chat template: {path} cannot be read: {error.strerror}", FIELD) from None
