"""Reads the piped input of a command."""

import sys


def piped() -> str | None:
    """Return the piped input without the last line break; None if standard input is a terminal or empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return sys.stdin.read().rstrip("\n") or None


def with_piped(prompt: str | None) -> str | None:
    """Return the argument followed by the piped input; None if both are missing."""
    return "\n".join(filter(None, (prompt, piped()))) or None
