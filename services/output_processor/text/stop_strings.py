"""Finds stop strings in text that arrives in pieces, and holds back only text that may become one."""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """Holds the stop string that was completed."""

    stop_string: str
    text: str
    """Text that was not shown before: up to the stop string, or through it if stop strings are included."""


class StopStrings:
    """Searches one output. It must not be fed again after a match."""

    __slots__ = ("_held", "_include", "_starts", "_stop")

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        """``stop`` must not contain an empty string."""
        assert all(stop), "an empty stop string would match everywhere"
        self._stop = tuple(stop)
        self._include = include_stop_str
        self._held = ""
        self._starts = [0] * len(self._stop)
        """Where in the held text each stop string may begin: no earlier beginning can become one any more. So each
        character is tried once as a beginning, whatever the strings and the text are."""

    def feed(self, text: str) -> str | Match:
        """Return text that can be shown now, or the match that ends first; of equal ones the first in the list."""
        text = self._held + text
        ends = []
        for i, stop in enumerate(self._stop):
            start = text.find(stop, self._starts[i])
            if start >= 0:
                ends.append((start + len(stop), i))
        if ends:
            end, i = min(ends)
            stop = self._stop[i]
            self._held = ""
            return Match(stop, text[: end if self._include else end - len(stop)])
        return self._hold(text)

    def pass_over(self, text: str) -> str:
        """Do the same as :meth:`feed` for text that may begin a stop string but not complete one."""
        return self._hold(self._held + text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _hold(self, text: str) -> str:
        starts = [_partial_match(text, stop, start) for stop, start in zip(self._stop, self._starts, strict=True)]
        keep = min(starts, default=len(text))
        self._starts = [start - keep for start in starts]
        self._held = text[keep:]
        return text[:keep]


def _partial_match(text: str, stop: str, start: int) -> int:
    """Return where, from ``start`` on, the longest suffix of ``text`` begins that is a proper prefix of ``stop``;
    ``len(text)`` if none."""
    start = text.find(stop[0], max(start, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
