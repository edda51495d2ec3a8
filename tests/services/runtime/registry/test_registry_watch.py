"""Tests that a watcher follows a coordinator over a socket, through gaps and restarts of the stream."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.registry import registry_view as registry_watch
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import Snapshot, WatchRequest


class Scripted(coordinator_pb2_grpc.CoordinatorServicer):
    """Streams these messages, one list for each watch."""

    def __init__(self, *streams: list[Snapshot]) -> None:
        self.requests: list[WatchRequest] = []
        self._streams = list(streams)

    async def Watch(  # type: ignore[override]
        self, request: WatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Snapshot]:
        self.requests.append(request)
        for message in self._streams.pop(0):
            yield message
        if not self._streams:
            await asyncio.Event().wait()


async def test_a_gap_is_followed_by_everything_again(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_watch, "REWATCH_SECONDS", 0.001)
    servicer = Scripted(
        [Snapshot(revision=1), Snapshot(base_revision=3, revision=4)],
        [Snapshot(revision=8)],
        [Snapshot(revision=9), Snapshot(base_revision=9, revision=10)],
    )
    server = grpc.aio.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
    address = f"unix:{socket_dir}/c"
    server.add_insecure_port(address)
    await server.start()
    revisions: list[int] = []
    reasons: list[str] = []
    done = asyncio.Event()

    def take(view: RegistryView) -> None:
        revisions.append(view.revision)
        if view.revision == 10:
            done.set()

    async with open_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        watching = asyncio.create_task(watch_registry(stub, take, reasons.append, without_loads=True))
        async with asyncio.timeout(30):
            await done.wait()
        watching.cancel()
    await server.stop(None)
    assert revisions == [1, 8, 9, 10]
    assert reasons == ["a change is missing after revision 1", "the stream ended"]
    assert all(request.changes and request.without_loads for request in servicer.requests)


class ScriptedCall:
    """A Watch that reads these messages."""

    def __init__(self, messages: list[Snapshot]) -> None:
        self._messages = messages

    async def read(self) -> Snapshot | None:
        return self._messages.pop(0) if self._messages else None

    def cancel(self) -> None:
        """Do nothing: the messages are over."""


async def test_a_message_that_cannot_be_taken_ends_its_stream_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_watch, "REWATCH_SECONDS", 0.0)
    streams = [ScriptedCall([Snapshot(revision=1)]), ScriptedCall([Snapshot(revision=2)])]
    reasons: list[str] = []
    done = asyncio.Event()

    def take(view: RegistryView) -> None:
        if view.revision == 1:
            raise OverflowError("int too big to convert")
        done.set()

    stub: Any = SimpleNamespace(Watch=lambda request: streams.pop(0) if streams else ScriptedCall([]))
    watching = asyncio.create_task(watch_registry(stub, take, reasons.append))
    async with asyncio.timeout(30):
        await done.wait()
    assert not watching.done()
    watching.cancel()
    assert reasons[0] == "a message could not be taken"
