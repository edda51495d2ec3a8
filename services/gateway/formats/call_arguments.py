"""Reads the arguments of a call that has ended."""

from typing import Any

import msgspec


def read_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; empty if the output ended within them, which its finish reason says."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
