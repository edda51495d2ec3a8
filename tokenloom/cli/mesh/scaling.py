"""Starts and stops engines of a running mesh for ``tokenloom scale``: where a supervisor of this user runs them, by its
control socket; elsewhere it says which command does it."""

import asyncio
from pathlib import Path
from typing import NamedTuple

from tokenloom.supervisor.control import Resized, ResizeRequest, ask

from ..failures import CommandFailed
from .coordinator import coordinator_of, run
from .local_mesh import find_mesh

_RESIZE_SECONDS = 3600.0
"""Engines load a model, or finish their requests, before the supervisor answers; it has limits of its own."""
_JOIN_SECONDS = 300.0
"""How long ranks that were started may take to load their model."""


class Target(NamedTuple):
    """Says which mesh is meant."""

    coordinator: str | None
    """Its address; None: that of a local mesh."""
    port: int | None
    """The HTTP port of a local mesh; None: the newest one."""
    certs: Path | None


def scale_engines(target: Target, count: int) -> str:
    """Start or stop engines until a local mesh has ``count``. Returns what was done, for a person.

    Raises ``CommandFailed`` if that does not work.
    """
    if target.coordinator is not None:
        raise CommandFailed(
            f"engines of a mesh elsewhere are started and stopped by what runs them. On Kubernetes: kubectl scale "
            f"statefulset/engine --replicas {count}"
        )
    had = _count(target.port)
    if count == had:
        return f"{_engines(count)}, as before"
    return f"{had} → {_engines(count)}" + _report(_resize(target.port, count, serving=True))


def scale_group(target: Target, group: str, size: int, wait: float | None) -> str:
    """Change the size of a data-parallel group. Ranks of a local mesh are started before and stopped afterwards.

    Raises ``CommandFailed`` if the group does not get that size; ranks that were started for it are then stopped.
    """
    if target.coordinator is not None:
        text = asyncio.run(run(target.coordinator, target.certs, group, size, wait or 0.0))
        return f"{text}\non Kubernetes: kubectl scale statefulset/engine --replicas {size}"
    address, had = coordinator_of(target.port), _count(target.port)
    resized = _resize(target.port, size, serving=False) if size > had else Resized()
    try:
        text = asyncio.run(run(address, target.certs, group, size, _JOIN_SECONDS if wait is None else wait))
    except BaseException:  # also Ctrl-C: the new ranks would wait, and the group is not asked to grow
        if resized.started:
            _resize(target.port, had, serving=False)
        raise
    if size < had:
        resized = _resize(target.port, size, serving=False)
    return text + _report(resized)


def _count(port: int | None) -> int:
    return sum(part.service == "engine" for part in find_mesh(port).parts)


def _resize(port: int | None, count: int, *, serving: bool) -> Resized:
    directory = Path(find_mesh(port).parts[0].state_file).parent
    try:
        resized = ask(directory, ResizeRequest(count, serving), _RESIZE_SECONDS)
    except OSError as error:
        raise CommandFailed(f"the supervisor of the mesh does not answer: {error}") from None
    if resized.error:
        raise CommandFailed(resized.error)
    return resized


def _report(resized: Resized) -> str:
    done = {"started": resized.started, "stopped, without requests": resized.stopped}
    return "".join(f"\n{what}: {', '.join(names)}" for what, names in done.items() if names)


def _engines(count: int) -> str:
    return f"{count} engine{'s' * (count != 1)}"
