"""Remembers where prompts with popular beginnings were placed, for output processors that place prompts. No I/O."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from tokenloom.services.runtime.placement.prefix_homes import NUM_HOMES, keys_of

MAX_PREFIXES = 4096
"""Remembered of each kind at most; the least recently picked are forgotten first."""
MAX_CHANGES = 512
"""Sent in one message at most."""

_Value = TypeVar("_Value")


class PrefixPlacements:
    """Keeps the last engines that were given a prompt, by its beginnings.

    The index of prefixes has the caches of all engines, but is far too large to be sent to all output processors. Of
    a beginning that came once only the shortest is sent: longer ones are mostly a prompt's own.
    """

    def __init__(self) -> None:
        # Not plain dictionaries, which step over everything that was removed from their front to find the first entry.
        self._engines = OrderedDict[int, tuple[str, ...]]()  # of beginnings that came again, the most recent last
        self._shortest = OrderedDict[int, str]()  # that came once
        self._longer = OrderedDict[int, str]()
        self._changed = OrderedDict[int, None]()

    def note(self, block_hashes: Sequence[int], engine: str) -> None:
        """Note that a prompt was placed on an engine."""
        came_once = self._shortest
        for key in keys_of(block_hashes):
            engines = self._engines.pop(key, ())
            if not engines and (first := came_once.pop(key, None)) is not None:
                engines = (first,)
                self._change(key)
            if not engines:
                _put(came_once, key, engine)
                if came_once is self._shortest:
                    self._change(key)
            else:
                if engine not in engines:
                    engines = (engine, *engines)[:NUM_HOMES]
                    self._change(key)
                _put(self._engines, key, engines)
            came_once = self._longer

    def all(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield every beginning with its engines, those that came once first."""
        yield from ((key, (engine,)) for key, engine in self._shortest.items())
        yield from self._engines.items()

    def take_changed(self) -> Iterator[tuple[int, Sequence[str]]]:
        """Yield those that changed since they were taken, the longest ago first, at most :data:`MAX_CHANGES`."""
        # 512 of some 13 bytes: the message stays small beside the loads. What is left over goes with the next one.
        for key in list(islice(self._changed, MAX_CHANGES)):
            del self._changed[key]
            if engines := self._engines.get(key, ()):
                yield key, engines
            elif key in self._shortest:
                yield key, (self._shortest[key],)

    def _change(self, key: int) -> None:
        if key not in self._changed:
            _put(self._changed, key, None)


def _put(prefixes: OrderedDict[int, _Value], key: int, value: _Value) -> None:
    """Add a beginning that is not there."""
    if len(prefixes) >= MAX_PREFIXES:
        prefixes.popitem(last=False)
    prefixes[key] = value
