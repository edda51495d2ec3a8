"""Tests what an engine that leaves does with its live attempts: nothing that was sampled is lost, and another engine
may continue what is not finished."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.services.engine.control.test_coordinator_link import is_serving, running_coordinator, see
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_service, make_settings, running_engine
from tokenloom.engine_core.data.errors import WeightsDamagedError
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_DEAD
from tokenloom.v1.engine_pb2 import Quarantine
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH

ENDLESS = 1500


async def test_with_finish_live_attempts_end_by_themselves(socket_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        async with running_engine(make_settings(socket_dir, drain="finish")) as host:
            peer = await stack.enter_async_context(Peer(host.address))
            await peer.send(make_add(1, [1, 2], 100))
            await peer.read_tokens()
            end = asyncio.create_task(peer.read_until_finished([1]))
        received = await end
    assert received.finished[1].reason == FINISH_REASON_LENGTH
    assert received.token_ids[1] == expected_tokens([1, 2], 100, VOCAB_SIZE)


@pytest.mark.parametrize(("drain", "drain_timeout"), [("migrate", 30.0), ("finish", 0.1)])
async def test_what_does_not_finish_continues_elsewhere(socket_dir: Path, drain: str, drain_timeout: float) -> None:
    settings = make_settings(socket_dir, drain=drain, drain_timeout=drain_timeout, hash_step_seconds=0.02)
    async with AsyncExitStack() as stack:
        async with running_engine(settings) as host:
            peer = await stack.enter_async_context(Peer(host.address))
            await peer.send(make_add(1, [1, 2], ENDLESS), make_add(2, [3], ENDLESS))
            await peer.read_tokens()
            end = asyncio.create_task(peer.read_until_finished([1, 2]))
        received = await end
    for slot, prompt in ((1, [1, 2]), (2, [3])):
        finished, tokens = received.finished[slot], received.token_ids[slot]
        assert finished.error.reason == "TRY_ELSEWHERE"
        assert finished.num_output_tokens == len(tokens), "what was sampled was sent"
        assert tokens == expected_tokens(prompt, len(tokens), VOCAB_SIZE)


async def test_an_attempt_that_races_with_the_drain_continues_elsewhere(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, hash_step_seconds=0.02)
    service = make_service(settings)
    async with running(service, settings) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, [1, 2], 20))
        await peer.read_tokens()
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        await peer.send(make_add(2, [3], 5))
        received = await peer.read_until_finished([1, 2])
        await draining
    assert received.finished[1].reason == FINISH_REASON_LENGTH
    assert received.finished[2].error.reason == "TRY_ELSEWHERE"


class Fragile(HashWorker):
    """Fails in its tenth step."""

    steps = 0

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.steps += 1
        if self.steps == 10:
            raise RuntimeError("the worker failed")
        super().execute_model(scheduled)


class Damaged(HashWorker):
    """Finds in its tenth step that its weights have changed."""

    steps = 0

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.steps += 1
        if self.steps == 10:
            raise WeightsDamagedError("bytes 0 to 7 of model.a have changed")
        super().execute_model(scheduled)


async def test_damaged_weights_are_no_request_s_fault_and_the_coordinator_remembers_them(
    socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, service):
        async with running_engine(settings, Damaged) as host, Peer(host.address) as peer:
            await peer.send(make_add(1, [1], ENDLESS))
            received = await peer.read_until_finished([1])
            assert isinstance(await host.failure.take(), Unavailable)
            (engine,) = await see(stub, lambda engines: [bool(each.report.fall_backs) for each in engines] == [True])
            assert engine.report.state == ENGINE_STATE_DEAD
            assert [each.kind for each in engine.report.fall_backs] == ["damaged_weights"]
            assert host.fall_backs.own() == [("damaged_weights", "bytes 0 to 7 of model.a have changed")]
        assert received.finished[1].error.reason == "TRY_ELSEWHERE"
        assert received.finished[1].error.message.startswith("The engine's weights are damaged")
        assert len(received.token_ids[1]) == 9
        async with running_engine(settings):  # its successor
            (engine,) = await see(stub, is_serving)
            assert [each.detail for each in engine.report.fall_backs] == ["bytes 0 to 7 of model.a have changed"]
        assert service.servicer is not None
        assert service.servicer._registry.num_ended["damaged_weights"] == 1
    assert "damaged_weights: bytes 0 to 7 of model.a have changed; requests go on at other engines" in caplog.text


async def test_an_engine_whose_tokens_are_wrong_ends_and_the_coordinator_remembers_it(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator", verify=0.01)
    async with running_coordinator(socket_dir) as (stub, service):
        async with running_engine(settings) as host, Peer(host.address) as peer, Peer(host.address) as other:
            await peer.send(make_add(1, [1], ENDLESS))
            reason = "request 7, output 0: token 3 is 5 instead of 6"
            await other.send(quarantine=Quarantine(engine_epoch=host.epoch + 1, reason="of another incarnation"))
            await other.send(quarantine=Quarantine(engine_epoch=host.epoch, reason=reason))
            received = await peer.read_until_finished([1])
            with pytest.raises(Unavailable, match="wrong_tokens: request 7, output 0: token 3 is 5 instead of 6"):
                raise await host.failure.take()
            (engine,) = await see(stub, lambda engines: [bool(each.report.fall_backs) for each in engines] == [True])
            assert engine.report.state == ENGINE_STATE_DEAD
            assert [each.kind for each in engine.report.fall_backs] == ["wrong_tokens"]
        assert received.finished[1].error.reason == "TRY_ELSEWHERE"
        async with running_engine(settings):  # its successor
            (engine,) = await see(stub, is_serving)
            assert [each.kind for each in engine.report.fall_backs] == ["wrong_tokens"]
        assert service.servicer is not None
        assert service.servicer._registry.num_ended == {"damaged_weights": 0, "wrong_tokens": 1}


async def test_an_engine_that_nobody_verifies_does_not_end_because_a_peer_says_so(socket_dir: Path) -> None:
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(quarantine=Quarantine(engine_epoch=host.epoch, reason="wrong"))
        await peer.send(make_add(1, [1], 5))
        assert (await peer.read_until_finished([1])).finished[1].reason == FINISH_REASON_LENGTH
        assert not host.failure.happened


@pytest.mark.parametrize(
    ("request_ids", "reason"),
    [
        (["a"], "ENGINE_DIED"),
        (["a", "a"], "ENGINE_DIED"),  # two samples of one request
        (["a", "b"], "TRY_ELSEWHERE"),
    ],
)
async def test_only_a_request_that_was_alone_is_blamed(socket_dir: Path, request_ids: list[str], reason: str) -> None:
    settings = make_settings(socket_dir)
    async with running_engine(settings, Fragile) as host, Peer(host.address) as peer:
        adds = [make_add(slot, [slot], ENDLESS) for slot, _ in enumerate(request_ids, 1)]
        for add, request_id in zip(adds, request_ids, strict=True):
            add.request_id = request_id
        await peer.send(*adds)
        received = await peer.read_until_finished([add.slot for add in adds])
        await host.failure.take()
    assert {finished.error.reason for finished in received.finished.values()} == {reason}
