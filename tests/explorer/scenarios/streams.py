"""Streams that stay open: sessions and KServe's, some with requests and some silent."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from tests.explorer.clients import TENANTS
from tests.explorer.gateway import TIMEOUT, Gateway
from tests.explorer.world import World
from tokenloom.request import errors
from tokenloom.services.gateway.files.sound_uploads import SoundUploads
from tokenloom.services.gateway.grpc.inference_servicer import InferenceServicer
from tokenloom.services.gateway.kserve.kserve_servicer import KServeServicer
from tokenloom.services.gateway.openai.body_reader import BodyReader
from tokenloom.services.gateway.tenants.api_keys import admit_calls
from tokenloom.services.gateway.tenants.tenant import TenantLimits
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve

MAX_STREAMS = 2
"""Of one tenant."""


class _Context:
    """Stands for gRPC's context of a call."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_written = 0

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, _: Any) -> None:
        await asyncio.sleep(0)
        self.num_written += 1

    async def send_initial_metadata(self, _: Any) -> None:
        await asyncio.sleep(0)


class StreamScenario:
    """Two tenants open more streams than they may have, and let some of them be silent for ever."""

    uses_disk = False

    async def run(self, world: World) -> None:
        gateway = Gateway(world, TenantLimits(sessions=MAX_STREAMS))
        await gateway.start()
        meshes: Any = SimpleNamespace(
            find=lambda _: (gateway.mesh, None), pick=lambda _: gateway.mesh, name_of=lambda name: name
        )
        shares = gateway.clients.shares
        inference = InferenceServicer(meshes, shares, TIMEOUT, SoundUploads(1 << 20, shares.sounds))
        triton = KServeServicer(BodyReader(strict=False), meshes, shares, TIMEOUT)
        servicers = ((inference.GenerateSession, _turn), (triton.ModelStreamInfer, _infer))
        open_streams: Counter[str] = Counter()

        def check() -> None:
            gateway.check_held()
            for share in shares:
                is_held = share.sessions == open_streams[share.name]
                world.check(is_held, "an open stream does not count for its tenant")

        world.loop.on_idle = check
        for number in range(6):
            method, make = servicers[number // 2 % 2]
            tenant = TENANTS[number // 4]
            world.actor(_stream(gateway, method, make, tenant, open_streams), f"stream {number}")
        await world.all_ended()
        await gateway.check()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _stream(
    gateway: Gateway, method: Callable[..., Any], make: Callable[[], Any], tenant: str, open_streams: Counter[str]
) -> None:
    """Send some requests on one stream, and then end it or be silent."""
    world, random = gateway.world, gateway.world.random
    num_turns, is_silent = random.randint(0, 2), random.random() < 0.4
    was_read = False

    async def turns() -> AsyncIterator[Any]:
        nonlocal was_read
        if not was_read:  # the servicer has taken the stream
            was_read = True
            open_streams[tenant] += 1
        for _ in range(num_turns):
            await world.step(3)
            yield make()
        if is_silent:
            await asyncio.Event().wait()

    await world.step(5)
    metadata = (("authorization", f"Bearer {tenant}"),)
    admit_calls(gateway.clients.keys)(SimpleNamespace(invocation_metadata=metadata))  # type: ignore[arg-type]
    context = _Context(world)
    try:
        await method(turns(), context)
        world.check(not is_silent, "a silent stream has ended as if it was complete")
    except (errors.RateLimitExceeded, errors.DeadlineExceeded):
        pass  # there are too many, or it was silent for too long
    finally:
        open_streams[tenant] -= was_read


def _turn() -> inference_pb2.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=2)
    return inference_pb2.GenerateRequest(text="abc", sampling_params=sampling)


def _infer() -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name="model")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"abc")
    request.parameters["max_tokens"].int64_param = 2
    return request
