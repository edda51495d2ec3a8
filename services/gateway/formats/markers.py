"""Finds markers in a text that arrives in pieces."""

from collections.abc import Sequence


def find_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Return the text before the first marker, that marker, and what follows it.

    Without a marker: what is certainly text, an empty string, and what may be the beginning of a marker.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    longest = max(map(len, markers))
    for start in range(max(len(text) - longest + 1, 0), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return text[:start], "", text[start:]
    return text, "", ""


def begins_marker(text: str, marker: str) -> bool:
    """Return whether the text is an incomplete beginning of the marker."""
    return len(text) < len(marker) and marker.startswith(text)
