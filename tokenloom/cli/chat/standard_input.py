"""Reads the piped input of a command."""

import sys

from ..failures import CommandFailed


def piped() -> str | None:
    """Return the piped input without the last line break; None if standard input is a terminal or empty.

    Raises `CommandFailed` for bytes that are no text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read().rstrip("\n") or None
    except UnicodeDecodeError:
        raise CommandFailed(f"standard input is not text in {sys.stdin.encoding}") from None


def with_piped(prompt: str | None) -> str | None:
    """Return the argument followed by the piped input; None if both are missing."""
    return "\n".join(filter(None, (prompt, piped()))) or None
