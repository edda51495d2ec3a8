"""Tests that a gateway works with some of the output processors, and looks for requests at all of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tokenloom.request.errors import RequestLost
from tokenloom.services.gateway.mesh import process_stream
from tokenloom.services.gateway.mesh.process_stream import ProcessStream, StreamNotNeeded
from tokenloom.services.runtime.liveness import LivenessTimer
from tokenloom.services.runtime.peers import subset
from tokenloom.v1.coordinator_pb2 import Position

BODY = {"model": MODEL, "prompt": "ab", "max_tokens": 100}
LOST = RequestLost("The request is not known.")


async def test_a_gateway_works_with_its_subset_and_seeks_among_all(socket_dir: Path) -> None:
    fake = FakeMesh(socket_dir)
    fake.coordinator.position = Position(index=0, count=3)
    addresses = fake.address("mesh"), fake.address("second")
    (near_address,) = subset.choose(addresses, subset.ReplicaPosition(0, 3), 1)
    near, far = fake.outputs, fake.second_outputs
    if near_address != addresses[0]:
        near, far = far, near
    async with fake.gateway(output_processors=addresses, peer_subset=1) as mesh, mesh.http() as http:
        async with asyncio.timeout(SOON):
            while (await http.get("/health")).json()["parts"]["output_processor"]["known"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        near.auto = ["x"]
        for _ in range(3):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert far.requests.empty()
        task = asyncio.create_task(http.post("/v1/completions", json=BODY, headers={"Idempotency-Key": "k"}))
        asked = [asyncio.create_task(each.next_resume()) for each in (near, far)]
        first, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # the request's id decides which
        ((request, _),) = [each.result() for each in first]
        request.fail(LOST)
        ((request, _),) = [await each for each in asked if each not in first]
        request.answer("found")
        assert (await task).json()["choices"][0]["text"] == "found"


async def test_a_stream_that_is_not_needed_ends_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stream, "IDLE_SECONDS", 1.0)
    owner: Any = object()
    needed, now = True, 100.0
    stream = ProcessStream(owner, lambda: needed)
    stream._unused = LivenessTimer(lambda: now)

    def look() -> None:
        nonlocal now
        for _ in range(3):
            now += 0.5
            stream._look()

    look()
    needed = False
    request: Any = object()
    stream.slots[1] = request
    look()
    stream.slots.clear()
    with pytest.raises(StreamNotNeeded):
        look()
