"""A small model of server-side apply: who owns a field, and what becomes of it when objects are applied again.

It has what Kubernetes documents of maps and values; lists are one value, as atomic lists are.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
_DEFAULTS: Mapping[str, Any] = {"replicas": 1}
"""What the API server gives a workload whose field no manager owns."""


class Conflict(Exception):
    """Another manager owns a field with another value."""


class LiveObject:
    """One object of a cluster."""

    def __init__(self) -> None:
        self._values: dict[Path, Any] = {}
        self._owners: dict[Path, set[str]] = {}

    def apply(self, manager: str, wanted: Mapping[str, Any], *, force: bool = False) -> None:
        """Set the fields of ``wanted``, and drop those that this manager owned alone and no longer has.

        Raises `Conflict`, unless it is forced, for a field with another value that another manager owns.
        """
        fields = dict(_fields(wanted))
        for path, value in fields.items():
            others = self._owners.get(path, set()) - {manager}
            if others and self._values[path] != value:
                if not force:
                    raise Conflict(f"{'.'.join(path)} belongs to {', '.join(sorted(others))}")
                self._owners[path] = set()
            self._values[path] = value
            self._owners.setdefault(path, set()).add(manager)
        for path in [each for each, owners in self._owners.items() if manager in owners and each not in fields]:
            self._owners[path].discard(manager)
            if not self._owners[path]:
                del self._owners[path], self._values[path]

    def update(self, manager: str, path: Path, value: Any) -> None:
        """Set one field as an update or the scale subresource does: the manager then owns it alone."""
        if self._values.get(path) != value:
            self._values[path], self._owners[path] = value, {manager}

    def get(self, path: Path) -> Any:
        return self._values.get(path, _DEFAULTS.get(path[-1]))


def _fields(value: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _fields(each, (*above, name))
        else:
            yield (*above, name), each


def key_of(each: Mapping[str, Any]) -> str:
    return f"{each['kind']}/{each['metadata']['name']}"


def scaled(objects: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return what the autoscalers among these objects scale, by kind and name, each with the least number."""
    found = {}
    for each in objects:
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            target, spec = each["spec"]["scaleTargetRef"], each["spec"]
            least = spec["minReplicas"] if "minReplicas" in spec else spec["minReplicaCount"]
            found[f"{target['kind']}/{target['name']}"] = int(least)
    return found
