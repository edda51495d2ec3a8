"""What was piped into a command."""

import sys


def piped() -> str | None:
    """All of it, without the last line break; None when standard input is a terminal or brings nothing."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    return sys.stdin.read().rstrip("\n") or None


def with_piped(prompt: str | None) -> str | None:
    """An argument and what was piped in, one after the other; None when there is neither."""
    return "\n".join(filter(None, (prompt, piped()))) or None
