"""A reader of KV that sends whatever it likes gets typed errors; the next one gets its blocks."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.mutations import mutated
from tests.ready_channel import ready_channel
from tests.services.engine.kv.kv_fakes import owning_core
from tests.services.engine.kv.test_kv_reading import REQUEST, FakeStub
from tests.services.engine.kv.test_kv_servicer import EPOCH, acquire
from tokenloom.engine_core.data.kv_messages import LEASE_ENDS
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.kv.kv_front import KVTransferServicer, serve_kv
from tokenloom.services.engine.kv.kv_loads import KVLink
from tokenloom.services.engine.kv.kv_peers import Reading
from tokenloom.services.runtime.host.host_dependencies import Network
from tokenloom.v1 import kv_transfer_pb2
from tokenloom.v1.kv_transfer_pb2 import ProgressRequest, ReleaseRequest, RenewRequest
from tokenloom.v1.kv_transfer_pb2_grpc import KVTransferStub


@pytest.fixture
async def stub(socket_dir: Path) -> AsyncIterator[Any]:
    link = KVLink(owning_core(10))
    server = serve_kv(Network(), f"unix:{socket_dir}/kv", KVTransferServicer(link, EPOCH), None, insecure=False)
    await server.start()
    answering = asyncio.create_task(link.run(lambda verify: None))
    async with ready_channel(server.address) as channel:
        yield KVTransferStub(channel)
    await server.close(0)
    answering.cancel()


@pytest.mark.parametrize("seed", range(10))
async def test_a_reader(stub: Any, seed: int) -> None:
    rng = random.Random(seed)
    acquisition = (await stub.Acquire(acquire())).acquisition_id
    calls = (
        (stub.Acquire, acquire()),
        (stub.Renew, RenewRequest(acquisition_id=acquisition, engine_epoch=EPOCH)),
        (stub.Progress, ProgressRequest(acquisition_id=acquisition, engine_epoch=EPOCH)),
        (stub.Release, ReleaseRequest(acquisition_id=acquisition, engine_epoch=EPOCH)),
    )
    for _ in range(30):
        method, request = rng.choice(calls)
        call = method(mutated(request, rng, rng.randint(1, 2)), timeout=0.2)
        try:
            if method is stub.Progress:
                await call.read()
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as failure:
            error = wire_errors.from_rpc(failure)
            assert type(error) is not errors.Internal, error.message
    assert list((await stub.Acquire(acquire())).block_ids) == [0, 1, 2]


class LyingOwner(FakeStub):
    """Changes its answers."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(3, checksums=[1, 2, 3])
        self._rng = rng

    async def Acquire(self, request: Any, timeout: float) -> kv_transfer_pb2.AcquireResponse:
        return mutated(await super().Acquire(request, timeout), self._rng, self._rng.randint(1, 3))

    async def Release(self, request: Any, timeout: float) -> kv_transfer_pb2.ReleaseResponse:
        return mutated(await super().Release(request, timeout), self._rng, self._rng.randint(1, 3))


@pytest.mark.parametrize("seed", range(4))
async def test_an_owner(seed: int) -> None:
    """A load is refused with a reason that metrics know, or its blocks are as many as its tokens need."""
    rng = random.Random(seed)
    reasons = set[str]()
    for _ in range(200):
        stub: Any = LyingOwner(rng)
        try:
            reading = await Reading.acquire(stub, REQUEST, num_tokens=48, block_size=16)
        except KVTransferError as failure:
            reasons.add(failure.reason)
            continue
        target = reading.target
        assert (len(target.block_ids), len(target.generations), target.transport) == (3, 3, "shm")
        verdict = await reading.release()
        assert verdict.valid or verdict.reason in LEASE_ENDS
        assert len(verdict.checksums) in (0, 3) or not verdict.valid
    assert reasons <= set(LEASE_ENDS)
