"""The link of one part: proxies that cut, delay and reset what passes."""

from typing import Protocol

from .fault import Action
from .proxy import Gate, Proxy

DELAY_SECONDS = 0.1
"""How late each piece arrives over a link with a delay."""


class Link(Protocol):
    """Describes what is in front of one part: see :class:`PartLink`."""

    def begin(self, action: Action) -> int: ...

    def end(self) -> None: ...

    def held_bytes(self) -> int: ...

    def delayed_bytes(self) -> int: ...


class PartLink:
    """Holds the proxies in front of one part."""

    def __init__(self, proxies: list[Proxy], delay: float = 0.0) -> None:
        """``delay``: seconds by which each piece is late without a fault."""
        self._proxies = proxies
        self._delay = delay
        self.end()

    def begin(self, action: Action) -> int:
        """Begin a fault; return the number of connections that it meets."""
        met = sum(proxy.num_connections for proxy in self._proxies)
        for proxy in self._proxies:
            if action is Action.RESET:
                proxy.reset()
            if action in (Action.CUT, Action.CUT_TO):
                proxy.to_server.close()
            if action in (Action.CUT, Action.CUT_FROM):
                proxy.from_server.close()
            if action is Action.DELAY:
                proxy.to_server.delay = proxy.from_server.delay = self._delay + DELAY_SECONDS
                proxy.to_server.delayed_bytes = proxy.from_server.delayed_bytes = 0
        return met

    def end(self) -> None:
        """Let everything pass again as without a fault."""
        for gate in self._gates():
            gate.delay = self._delay
            gate.open()

    def held_bytes(self) -> int:
        """Return how many bytes were held since the last cut began."""
        return sum(gate.held_bytes for gate in self._gates())

    def delayed_bytes(self) -> int:
        """Return how many bytes were late since the last delay began."""
        return sum(gate.delayed_bytes for gate in self._gates())

    def _gates(self) -> list[Gate]:
        return [gate for proxy in self._proxies for gate in (proxy.to_server, proxy.from_server)]
