"""Finds the coordinator of a mesh, proves a name to it, and asks it for another size of a data-parallel group. Starts
and stops engines of a running mesh: where a supervisor of this user runs them, by its control socket; elsewhere it says
which command does it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers.callers import OPERATOR
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.supervisor.control import Resized, ResizeRequest, ask
from tokenloom.supervisor.state_dir import read_part_state
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import EngineEntry, ScaleRequest, Snapshot, WatchRequest

from ..failures import CommandFailed
from .local_mesh import find_mesh


def coordinator_of(port: int | None) -> str:
    """Return the address of the coordinator of a local mesh. Raises ``CommandFailed`` if there is none."""
    for part in find_mesh(port).parts:
        if part.service == "coordinator" and (state := read_part_state(Path(part.state_file))) is not None:
            return state.address
    raise CommandFailed("the coordinator of the mesh does not listen yet; try again")


def tls_of(certs: Path | None, *names: str) -> MeshTLS | None:
    """Return the certificate of the first of ``names`` that a folder has; None: the mesh uses plain text.

    Raises ``CommandFailed`` if the folder has none of them, or a file that cannot be used.
    """
    if certs is None:
        return None
    name = next((name for name in names if (certs / f"{name}.crt").exists()), names[-1])
    try:
        return MeshTLS(CertificateFiles(certs / "ca.crt", certs / f"{name}.crt", certs / f"{name}.key", "certs"))
    except InvalidArgument as error:
        raise CommandFailed(error.message) from None


_LOOK_SECONDS = 10.0
_SCALE_SECONDS = 90.0
"""More than the coordinator gives the ranks to agree."""
_POLL_SECONDS = 0.2
_NOT_JOINED = grpc.StatusCode.FAILED_PRECONDITION


async def run(coordinator: str, certs: Path | None, group: str, size: int, wait: float) -> str:
    """Change the size of a group and return what has changed, for a person.

    Args:
        coordinator: Its address.
        certs: Folder with the operator's certificate; None: the mesh uses plain text.
        group: Its name.
        size: Ranks that it should have.
        wait: Seconds in which ranks that are missing may join.

    Raises ``CommandFailed`` if the group does not get that size.
    """
    async with Channels(tls_of(certs, OPERATOR)).open(coordinator, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                before = await _members(stub, group)
            await _scale(stub, ScaleRequest(data_parallel_group=group, data_parallel_size=size), wait)
        except grpc.aio.AioRpcError as error:
            raise CommandFailed(f"the coordinator at {coordinator} answered: {error.details()}") from None
        except TimeoutError:
            raise CommandFailed(f"the coordinator at {coordinator} did not answer in time") from None
    return report(group, size, before)


def report(group: str, size: int, before: Sequence[EngineEntry]) -> str:
    """Say what a change of size has done. ``before``: the ranks of the group before the change."""
    had = max((entry.report.group_size for entry in before), default=0)
    change = f"{size} rank{'s' * (size != 1)}"
    text = f"data-parallel group {group}: " + (f"{change}, as before" if had == size else f"{had} → {change}")
    beyond = sorted(
        (entry.identity.data_parallel_rank, entry.identity.engine_id)
        for entry in before
        if size <= entry.identity.data_parallel_rank < had
    )
    if beyond:
        names = ", ".join(f"{name} (rank {rank})" for rank, name in beyond)
        text += f"\nwithout requests now, may be stopped: {names}"
    return text


async def _members(stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", group: str) -> list[EngineEntry]:
    call = stub.Watch(WatchRequest())
    try:
        snapshot = await call.read()
    finally:
        call.cancel()
    if not isinstance(snapshot, Snapshot):
        raise CommandFailed("the coordinator ended the stream of its registry; try again")
    return [entry for entry in snapshot.engines if entry.identity.data_parallel_group == group]


async def _scale(stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", request: ScaleRequest, wait: float) -> None:
    """Call ``Scale``, again while ranks have not joined and may still do. Raises ``AioRpcError``."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + wait
    while True:
        try:
            await stub.Scale(request, timeout=_SCALE_SECONDS)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not _NOT_JOINED or loop.time() >= ends_at:
                raise
        await asyncio.sleep(_POLL_SECONDS)


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
