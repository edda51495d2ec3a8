"""Counts the processes of each service that have enrolled, and gives each one its position among them."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition


class EnrolledReplicas:
    """Holds the processes whose ``Enroll`` lasts. A process that calls twice counts once."""

    def __init__(self) -> None:
        self._calls: dict[str, Counter[str]] = {}  # by service, of each process
        self._positions: dict[str, dict[str, ReplicaPosition]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._is_closed = False

    @contextmanager
    def enrolled(self, service: str, name: str) -> Iterator[None]:
        """Count a process while the body runs."""
        calls = self._calls.setdefault(service, Counter())
        # The new stream of a process that reconnects may open before the old one has ended; the count bridges the two.
        calls[name] += 1
        self._announce(service)
        try:
            yield
        finally:
            calls[name] -= 1
            if not calls[name]:
                del calls[name]
                self._announce(service)

    def position(self, service: str, name: str) -> ReplicaPosition:
        """Return the position of a process that is enrolled."""
        if (found := self._positions.get(service)) is None:
            found = self._positions[service] = subset.positions(self._calls[service])
        return found[name]

    def changed(self, service: str) -> asyncio.Event:
        """Return the event that the next change of the service's positions sets."""
        return self._changed.setdefault(service, asyncio.Event())

    def close(self) -> None:
        """Announce no change any more: calls that end because the coordinator stops do not move the others."""
        self._is_closed = True

    def _announce(self, service: str) -> None:
        self._positions.pop(service, None)
        if not self._is_closed and (changed := self._changed.pop(service, None)) is not None:
            changed.set()
