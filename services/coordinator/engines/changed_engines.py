"""Keeps what changed of the engines until the coordinator sends it to the parts that watch them."""

from collections.abc import Iterable


class ChangedEngines:
    """Keeps names of engines in the order of their changes: those whose load changed, by a report or a pick, and those
    that joined, left, or changed in something else, for example their state."""

    def __init__(self) -> None:
        self._loads: dict[str, None] = {}
        self._others: dict[str, None] = {}

    def load(self, name: str) -> None:
        """Note that an engine's load changed."""
        self._loads[name] = None

    def other(self, names: Iterable[str]) -> None:
        """Note that engines changed in more than their load."""
        self._others.update(dict.fromkeys(names))

    def take_others(self) -> Iterable[str]:
        """Return the engines that changed in more than their load, and forget them."""
        names, self._others = self._others, {}
        for name in names:
            self._loads.pop(name, None)
        return names

    def take_loads(self) -> Iterable[str]:
        """Return the engines of which only the load changed, and forget them; :meth:`take_others` must come first."""
        names, self._loads = self._loads, {}
        return names
