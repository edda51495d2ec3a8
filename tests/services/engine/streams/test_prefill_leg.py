"""Prefill legs: what the front tells of KV that its core holds, and when it lets go of it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.services.engine.kv.kv_fakes import FakeCore, running_front
from tests.services.engine.peer import Peer, make_add
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, SchedulerStats
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.engine_pb2 import KVGrant, KVSource, StopAt
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_PREFILLED, FINISH_REASON_STOP

PROMPT = [1, 2, 3, 4, 5, 6]


class Front(NamedTuple):
    core: FakeCore
    host: Host
    peer: Peer

    def source(self, request: EngineCoreRequest, num_tokens: int) -> KVSource:
        return KVSource(
            engine_id="prefill-0", engine_epoch=self.host.epoch, lease_id=request.lease_id, num_tokens=num_tokens
        )


@pytest.fixture
async def front(socket_dir: Path) -> AsyncIterator[Front]:
    core = FakeCore()
    async with (
        running_front(socket_dir, "prefill-0", core, role="prefill", coordinator="") as host,
        Peer(host.address) as peer,
    ):
        yield Front(core, host, peer)


async def prefill(front: Front, slot: int) -> EngineCoreRequest:
    """Adds a prefill leg and lets the core finish it."""
    await front.peer.send(make_add(slot, PROMPT, hold_kv=True))
    request = await front.core.noted(EngineCoreRequest)
    front.core.finish(request, [9], FinishReason.PREFILLED)
    await front.peer.read_until_finished([slot])
    return request


async def test_a_finished_prefill_says_where_its_kv_is(front: Front) -> None:
    await front.peer.send(make_add(1, PROMPT, hold_kv=True, accepted_token_ids=[7, 8]))
    request = await front.core.noted(EngineCoreRequest)
    assert len(request.lease_id) == 16
    front.core.put(EngineCoreOutput(request.request_id, [9], 2, FinishReason.PREFILLED))
    received = await front.peer.read_until_finished([1])
    assert received.token_ids[1] == [9]
    finished = received.finished[1]
    assert (finished.reason, finished.num_output_tokens) == (FINISH_REASON_PREFILLED, 3)
    assert finished.kv == front.source(request, 8)


async def test_every_lease_has_a_name_of_its_own(front: Front) -> None:
    await front.peer.send(make_add(1, PROMPT, hold_kv=True), make_add(2, PROMPT, hold_kv=True), make_add(3, PROMPT))
    leases = [(await front.core.noted(EngineCoreRequest)).lease_id for _ in range(3)]
    assert len(set(leases)) == 3
    assert leases[2] == b""


async def test_a_long_prompts_lease_is_told_ahead(front: Front) -> None:
    await front.peer.send(make_add(1, PROMPT, hold_kv=True))
    request = await front.core.noted(EngineCoreRequest)
    front.core.put(EngineCoreOutput(request.request_id, [], kv_granted_tokens=6))
    while (frame := await front.peer.read()) is not None and not frame.kv_granted:
        pass
    assert frame is not None
    assert list(frame.kv_granted) == [KVGrant(slot=1, kv=front.source(request, 6))]


async def test_a_first_token_that_ends_the_request_leaves_nothing(front: Front) -> None:
    await front.peer.send(make_add(1, PROMPT, hold_kv=True))
    request = await front.core.noted(EngineCoreRequest)
    front.core.put(EngineCoreOutput(request.request_id, [9], 0, FinishReason.STOP, stop_token_id=9))
    finished = (await front.peer.read_until_finished([1])).finished[1]
    assert finished.reason == FINISH_REASON_STOP
    assert not finished.HasField("kv")


async def test_an_abort_during_the_prefill_reaches_the_core(front: Front) -> None:
    await front.peer.send(make_add(1, PROMPT, hold_kv=True))
    request = await front.core.noted(EngineCoreRequest)
    await front.peer.send(abort_slots=[1])
    assert (await front.peer.read_until_finished([1])).finished[1].reason == FINISH_REASON_ABORT
    assert await front.core.noted(str) == request.request_id


@pytest.mark.parametrize("how", ["abort", "stop", "lost stream"])
async def test_what_nobody_will_read_is_dropped(front: Front, how: str) -> None:
    request = await prefill(front, 1)
    assert not front.core.has_noted(str)
    if how == "abort":
        await front.peer.send(abort_slots=[1, 5])
    elif how == "stop":
        await front.peer.send(stop_at=[StopAt(slot=1, num_tokens=1)])
    else:
        front.peer.call.cancel()
    assert await front.core.noted(str) == request.request_id


async def test_it_is_dropped_once(front: Front) -> None:
    first = await prefill(front, 1)
    await front.peer.send(abort_slots=[1])
    await front.peer.send(abort_slots=[1])
    second = await prefill(front, 2)
    await front.peer.send(abort_slots=[2])
    assert [await front.core.noted(str) for _ in range(2)] == [first.request_id, second.request_id]


async def test_an_engine_without_a_kv_port_holds_nothing(socket_dir: Path) -> None:
    for changes in ({}, {"kv_transports": ["shm"], "kv_listen": ""}):
        core = FakeCore()
        settings = {"coordinator": "", "kv_transports": [], **changes}
        async with running_front(socket_dir, "engine-0", core, **settings) as host, Peer(host.address) as peer:
            await peer.send(make_add(1, PROMPT, hold_kv=True))
            finished = (await peer.read_until_finished([1])).finished[1]
            assert finished.error.field == "hold_kv"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"kv_source": KVSource(engine_id="a", lease_id=bytes(15), num_tokens=1)}, "kv_source"),
        ({"kv_source": KVSource(engine_id="", lease_id=bytes(16), num_tokens=1)}, "kv_source"),
        ({"kv_source": KVSource(engine_id="a" * 300, lease_id=bytes(16), num_tokens=1)}, "kv_source"),
        ({"kv_source": KVSource(engine_id="a", lease_id=bytes(16), num_tokens=0)}, "kv_source"),
        ({"kv_source": KVSource(engine_id="a", lease_id=bytes(16), num_tokens=7)}, "kv_source"),
        ({"kv_source": KVSource(engine_id="a", lease_id=bytes(16), num_tokens=6), "hold_kv": True}, "hold_kv"),
        ({"awaits_tokens": True}, "awaits_tokens"),
    ],
)
async def test_malformed_handles_are_refused(front: Front, fields: dict[str, object], field: str) -> None:
    await front.peer.send(make_add(1, PROMPT, **fields))
    finished = (await front.peer.read_until_finished([1])).finished[1]
    assert (finished.error.reason, finished.error.field) == ("INVALID_ARGUMENT", field)
    assert not front.core.has_noted(EngineCoreRequest)


async def test_what_the_core_counts_is_shown(front: Front) -> None:
    stats = [
        SchedulerStats(
            kv_blocks_received=3 * n, kv_bytes_received={"shm": 12 * n}, kv_recomputes={"checksum": n}, num_leases=n
        )
        for n in (1, 2)
    ]
    await front.peer.send(make_add(1, PROMPT))
    request = await front.core.noted(EngineCoreRequest)
    front.core.put(stats=stats[0])
    front.core.put(EngineCoreOutput(request.request_id, [1], 0, FinishReason.LENGTH), stats=stats[1])
    await front.peer.read_until_finished([1])
    labels = {"engine": "prefill-0", "model_name": "tokenloom-demo"}
    for name, more, value in (
        ("kv_transfer_blocks_total", {}, 6),
        ("kv_transfer_bytes_total", {"transport": "shm"}, 24),
        ("kv_recompute_total", {"reason": "checksum"}, 2),
        ("kv_recompute_total", {"reason": "lease_expired"}, 0),
        ("kv_leases", {}, 2),
    ):
        assert front.host.metrics.get_sample_value(f"tokenloom_{name}", {**labels, **more}) == value
