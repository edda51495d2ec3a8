"""The contract of ``Engine.Connect``, over a unix socket, with the core in this process."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings, running_engine, seconds
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.core.core_link import FEWEST_OTHERS
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.streams import slotted_stream as server_stream
from tokenloom.v1 import types_pb2
from tokenloom.v1.engine_pb2 import EngineFrame, GetEngineInfoRequest, KVSource, StopAt
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_ERROR, FINISH_REASON_LENGTH, FINISH_REASON_STOP

ENDLESS = 1500


@pytest.fixture
async def host(socket_dir: Path) -> AsyncIterator[Host]:
    async with running_engine(make_settings(socket_dir)) as host:
        yield host


@pytest.fixture
async def peer(host: Host) -> AsyncIterator[Peer]:
    async with Peer(host.address) as peer:
        yield peer


async def wait_for_idle(address: str) -> None:
    async with open_channel(address) as channel, asyncio.timeout(30):
        admin = EngineAdminStub(channel)
        while (info := await admin.GetEngineInfo(GetEngineInfoRequest())).waiting + info.running:
            pass


class TestHello:
    async def test_both_sides_say_who_they_are(self, peer: Peer, host: Host) -> None:
        frame = await peer.read()
        assert frame is not None
        assert (frame.hello.peer_id, frame.hello.epoch) == ("engine-0", host.epoch)
        assert frame.hello.fingerprint.model == "tokenloom-demo"
        assert frame.hello.fingerprint.block_size == 4

    @pytest.mark.parametrize(
        ("hello", "difference"),
        [
            ({"expected_peer_id": "engine-7"}, "engine-7"),
            ({"expected_epoch": 12345}, "incarnation"),
            ({"fingerprint": types_pb2.Fingerprint(model="other")}, "model"),
            ({"fingerprint": types_pb2.Fingerprint(block_size=16)}, "block_size"),
        ],
    )
    async def test_a_difference_ends_the_stream_and_is_named(
        self, host: Host, hello: dict[str, object], difference: str
    ) -> None:
        async with Peer(host.address, **hello) as peer:
            code, details = await peer.status()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert difference in details

    async def test_only_the_first_message_carries_one(self, peer: Peer) -> None:
        await peer.send(hello=peer.hello)
        assert (await peer.status())[0] is grpc.StatusCode.FAILED_PRECONDITION


class TestSteps:
    async def test_each_step_is_one_frame_of_columns(self, socket_dir: Path) -> None:
        prompts = {slot: [slot] * (slot + 2) for slot in range(1, 9)}
        settings = make_settings(socket_dir, hash_step_seconds=0.03)
        async with running_engine(settings) as host, Peer(host.address) as peer:
            await peer.send(*(make_add(slot, prompt, 12) for slot, prompt in prompts.items()))
            received = await peer.read_until_finished(prompts)
        for slot, prompt in prompts.items():
            assert received.token_ids[slot] == expected_tokens(prompt, 12, VOCAB_SIZE)
            assert received.finished[slot].reason == FINISH_REASON_LENGTH
            assert received.finished[slot].num_output_tokens == 12
            assert received.finished[slot].prefill_ns > 0
        data = [frame for frame in received.frames if frame.slot]
        steps = [frame.step for frame in data]
        assert steps == sorted(set(steps))
        assert len(data) <= 13  # all in a step, but for those that came while the first one ran
        counts = [list(frame.num_tokens) or [1] * len(frame.slot) for frame in data]
        assert [sum(each) for each in counts] == [len(frame.token_ids) for frame in data]
        # A write that takes longer than a step merges two of them; on a busy machine some do, but not most.
        assert sum(not frame.num_tokens for frame in data) > len(data) / 2

    async def test_quick_steps_share_a_frame(self, socket_dir: Path) -> None:
        settings = make_settings(socket_dir, frame_interval=0.1)
        async with running_engine(settings) as host, Peer(host.address) as peer:
            started = asyncio.get_running_loop().time()
            await peer.send(make_add(1, [1, 2], 100))
            received = await peer.read_until_finished([1])
            seconds = asyncio.get_running_loop().time() - started
        assert received.token_ids[1] == expected_tokens([1, 2], 100, VOCAB_SIZE)
        data = [frame for frame in received.frames if frame.slot]
        assert list(data[0].token_ids) == received.token_ids[1][:1]
        assert len(data) <= 2 + seconds / 0.05

    async def test_a_first_token_between_two_frames_leaves_the_other_tokens_waiting(self, socket_dir: Path) -> None:
        settings = make_settings(socket_dir, frame_interval=0.1)
        async with running_engine(settings) as host, Peer(host.address) as peer:
            await peer.send(make_add(1, [1, 2], 2000))
            await peer.read_tokens()
            for slot in range(2, 9):  # on a busy machine a frame may be due just then
                await peer.send(make_add(slot, [slot], 2))
                await peer.read_until_finished([slot])
            await peer.send(abort_slots=[1])
            received = await peer.read_until_finished([1])
        begun = [list(frame.slot) for frame in received.frames if any(not index for index in frame.token_index)]
        assert sum(len(slots) == 1 for slots in begun[1:]) > 0
        assert received.token_ids[1] == expected_tokens([1, 2], len(received.token_ids[1]), VOCAB_SIZE)

    async def test_a_first_token_has_a_frame_before_the_other_tokens_of_its_step(self, socket_dir: Path) -> None:
        others = range(1, FEWEST_OTHERS + 1)
        async with running_engine(make_settings(socket_dir, max_num_seqs=32)) as host, Peer(host.address) as peer:
            await peer.send(*(make_add(slot, [slot, 2], 2000) for slot in others))
            while set(peer.received.token_ids) < set(others):
                await peer.read_tokens()
            await peer.send(make_add(99, [3], 2))
            await peer.read_until_finished([99])
            frames = peer.received.frames
            (number,) = [at for at, frame in enumerate(frames) if 99 in frame.slot and 0 in frame.token_index]
            while len(frames) < number + 2:
                await peer.read()
        first, rest = frames[number : number + 2]
        assert list(first.slot) == [99]
        assert rest.step == first.step
        assert set(rest.slot) == set(others)

    async def test_stop_tokens_end_a_request(self, peer: Peer) -> None:
        tokens = expected_tokens([7, 8], 4, VOCAB_SIZE)
        params = types_pb2.SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=[tokens[3]])
        await peer.send(make_add(1, [7, 8], sampling_params=params))
        received = await peer.read_until_finished([1])
        assert received.token_ids[1] == tokens
        assert received.finished[1].reason == FINISH_REASON_STOP
        assert received.finished[1].stop_token_id == tokens[3]

    async def test_accepted_tokens_count(self, peer: Peer) -> None:
        tokens = expected_tokens([5, 6], 10, VOCAB_SIZE)
        await peer.send(make_add(1, [5, 6], 10, accepted_token_ids=tokens[:6]))
        received = await peer.read_until_finished([1])
        assert received.first_index[1] == 6
        assert received.token_ids[1] == tokens[6:]
        assert received.finished[1].num_output_tokens == 10

    async def test_accepted_tokens_that_meet_an_end_are_answered_without_a_token(self, peer: Peer) -> None:
        await peer.send(make_add(1, [5, 6], 3, accepted_token_ids=[1, 2, 3]))
        received = await peer.read_until_finished([1])
        assert 1 not in received.token_ids
        assert received.finished[1].reason == FINISH_REASON_LENGTH
        assert received.finished[1].num_output_tokens == 3

    async def test_the_second_of_equal_prompts_comes_from_the_cache(self, peer: Peer) -> None:
        await peer.send(make_add(1, [9] * 20))
        await peer.read_until_finished([1])
        await peer.send(make_add(2, [9] * 20))
        received = await peer.read_until_finished([2])
        assert received.token_ids[1] == received.token_ids[2]
        assert received.finished[1].cached_tokens == 0
        assert received.finished[2].cached_tokens >= 16

    async def test_frames_stay_below_what_the_peer_receives(self, host: Host) -> None:
        peer = Peer(host.address, credit=0)
        peer.hello.max_message_bytes = 1024
        async with peer:
            await peer.send(*(make_add(slot, [slot], 100) for slot in range(1, 5)))
            while not (frame := await peer.read()) or frame.step < 100:
                pass  # heartbeats: until all is computed
            await peer.send(credit=100)
            received = await peer.read_until_finished(range(1, 5))
        for slot in range(1, 5):
            assert received.token_ids[slot] == expected_tokens([slot], 100, VOCAB_SIZE)
        data = [frame for frame in received.frames if frame.slot]
        assert len(data) > 1
        assert max(frame.ByteSize() for frame in data) <= 1024


class TestEnds:
    async def test_abort_is_answered_once_with_what_was_sent(self, peer: Peer, host: Host) -> None:
        await peer.send(make_add(1, [1, 2], ENDLESS))
        await peer.read_tokens()
        await peer.send(abort_slots=[1, 1, 99])
        received = await peer.read_until_finished([1])
        assert received.finished[1].reason == FINISH_REASON_ABORT
        assert received.finished[1].num_output_tokens == len(received.token_ids[1])
        await wait_for_idle(host.address)

    async def test_stop_at_ends_with_the_count_that_was_named(self, peer: Peer, host: Host) -> None:
        await peer.send(make_add(1, [1, 2], ENDLESS))
        while len(peer.received.token_ids.get(1, ())) < 5:
            await peer.read_tokens()
        await peer.send(stop_at=[StopAt(slot=1, num_tokens=4)])
        received = await peer.read_until_finished([1])
        assert received.finished[1].reason == FINISH_REASON_STOP
        assert received.finished[1].num_output_tokens == 4
        await wait_for_idle(host.address)

    async def test_in_a_message_adds_come_first_then_stops_then_aborts(self, peer: Peer) -> None:
        await peer.send(
            make_add(1, [1], ENDLESS),
            make_add(2, [2], ENDLESS, accepted_token_ids=[3, 4]),
            stop_at=[StopAt(slot=2, num_tokens=1)],
            abort_slots=[1, 2],
        )
        received = await peer.read_until_finished([1, 2])
        assert received.finished[1].reason == FINISH_REASON_ABORT
        assert received.finished[2].reason == FINISH_REASON_STOP
        assert received.finished[2].num_output_tokens == 1

    async def test_half_close_lets_live_requests_finish(self, peer: Peer) -> None:
        await peer.send(make_add(1, [1, 2], 30))
        await peer.call.done_writing()
        assert await peer.status() == (grpc.StatusCode.OK, "")
        assert peer.received.token_ids[1] == expected_tokens([1, 2], 30, VOCAB_SIZE)
        assert peer.received.finished[1].reason == FINISH_REASON_LENGTH

    async def test_a_reset_frees_everything_within_a_second(self, peer: Peer, host: Host) -> None:
        await peer.send(*(make_add(slot, [slot], ENDLESS) for slot in range(1, 5)))
        await peer.read_tokens()
        peer.call.cancel()
        await wait_for_idle(host.address)

    async def test_time_runs_out(self, peer: Peer, host: Host) -> None:
        await peer.send(
            make_add(1, [1, 2], ENDLESS, timeout=seconds(0.1)),
            make_add(2, [3, 4], ENDLESS, timeout=seconds(60)),
            make_add(3, [5, 6], timeout=seconds(0)),
        )
        received = await peer.read_until_finished([1, 3])
        assert received.finished[1].num_output_tokens == len(received.token_ids.get(1, ()))
        for slot in (1, 3):
            assert received.finished[slot].reason == FINISH_REASON_ERROR
            assert received.finished[slot].error.reason == "DEADLINE_EXCEEDED"
        assert 2 not in received.finished


class TestBadRequests:
    @pytest.mark.parametrize(
        ("prompt", "fields", "field"),
        [
            ([], {}, "prompt"),
            ([VOCAB_SIZE], {}, "prompt"),
            ([2**32 - 1], {}, "prompt"),
            ([1] * 2048, {}, "prompt"),
            ([1], {"sampling_params": None}, "task"),
            ([1], {"sampling_params": types_pb2.SamplingParams(max_tokens=0)}, "max_tokens"),
            ([1], {"sampling_params": types_pb2.SamplingParams(max_tokens=2048)}, "max_tokens"),
            ([1], {"sampling_params": types_pb2.SamplingParams(temperature=float("nan"))}, "temperature"),
            ([1], {"sampling_params": types_pb2.SamplingParams(top_p=0.0)}, "top_p"),
            ([1], {"sampling_params": types_pb2.SamplingParams(repetition_penalty=float("inf"))}, "repetition_penalty"),
            ([1], {"sampling_params": types_pb2.SamplingParams(logprobs=21)}, "logprobs"),
            ([1], {"sampling_params": types_pb2.SamplingParams(stop_token_ids=[VOCAB_SIZE])}, "stop_token_ids"),
            ([1], {"accepted_token_ids": [VOCAB_SIZE]}, "accepted_token_ids"),
            ([1], {"accepted_token_ids": [1] * 2048}, "accepted_token_ids"),
            ([1], {"kv_source": KVSource(engine_id="engine-1")}, "kv_source"),
            ([1], {"hold_kv": True}, "hold_kv"),
            ([1], {"priority": -1}, "priority"),
            ([1], {"tenant": "t" * 257}, "tenant"),
        ],
    )
    async def test_the_field_is_named_and_the_stream_goes_on(
        self, peer: Peer, prompt: list[int], fields: dict[str, object], field: str
    ) -> None:
        await peer.send(make_add(1, prompt, **fields), make_add(2, [1, 2, 3]))
        received = await peer.read_until_finished([1, 2])
        assert received.finished[1].reason == FINISH_REASON_ERROR
        error = wire_errors.from_proto(received.finished[1].error)
        assert isinstance(error, errors.InvalidArgument)
        assert error.field == field
        assert received.token_ids[2] == expected_tokens([1, 2, 3], 5, VOCAB_SIZE)

    @pytest.mark.parametrize("slots", [(0,), (2, 1), (3, 3)])
    async def test_slots_only_grow(self, peer: Peer, slots: tuple[int, ...]) -> None:
        await peer.send(*(make_add(slot, [1], ENDLESS) for slot in slots))
        code, details = await peer.status()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "slots must increase" in details

    async def test_a_full_engine_says_when_to_come_again(self, socket_dir: Path) -> None:
        settings = make_settings(socket_dir, max_num_seqs=1, max_waiting=1)
        async with running_engine(settings) as host, Peer(host.address) as peer:
            await peer.send(*(make_add(slot, [slot], ENDLESS) for slot in (1, 2, 3)))
            received = await peer.read_until_finished([3])
            error = wire_errors.from_proto(received.finished[3].error)
            assert isinstance(error, errors.ResourceExhausted)
            assert error.retry_after is not None
            await peer.send(abort_slots=[1, 2])
            await peer.read_until_finished([1, 2])


class TestCredit:
    async def test_without_credit_steps_merge_and_heartbeats_tell_the_step(self, host: Host) -> None:
        async with Peer(host.address, credit=2) as peer:
            await peer.send(make_add(1, [1, 2], ENDLESS))
            first, second = await peer.read_tokens(), await peer.read_tokens()
            beats = [await peer.read(), await peer.read()]
            for beat in beats:
                assert beat is not None
                assert not beat.slot
                assert not beat.finished
            assert beats[0].step < beats[1].step  # type: ignore[union-attr]
            await peer.send(credit=1)
            merged = await peer.read_tokens()
            assert merged.num_tokens[0] > beats[1].step - beats[0].step  # type: ignore[union-attr]
            assert merged.token_index[0] == len(first.slot) + sum(second.num_tokens or [1])
            await peer.send(abort_slots=[1], credit=5)
            await peer.read_until_finished([1])
        assert peer.received.token_ids[1] == expected_tokens([1, 2], len(peer.received.token_ids[1]), VOCAB_SIZE)

    async def test_a_stop_reaches_back_into_what_was_not_sent(self, host: Host) -> None:
        async with Peer(host.address, credit=0) as peer:
            await peer.send(make_add(1, [1, 2], 20), make_add(2, [3, 4], ENDLESS))
            while not (frame := await peer.read()) or frame.step < 25:
                pass  # the engine ended slot 1 by now, but nobody heard
            await peer.send(stop_at=[StopAt(slot=1, num_tokens=3), StopAt(slot=2, num_tokens=4)], credit=5)
            received = await peer.read_until_finished([1, 2])
        assert received.finished[1].reason == received.finished[2].reason == FINISH_REASON_STOP
        assert received.token_ids[1] == expected_tokens([1, 2], 3, VOCAB_SIZE)
        assert received.token_ids[2] == expected_tokens([3, 4], 4, VOCAB_SIZE)

    async def test_a_peer_that_takes_nothing_is_given_up(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_stream, "NO_CREDIT_SECONDS", 0.4)
        async with Peer(host.address, credit=0) as peer:
            await peer.send(make_add(1, [1, 2], ENDLESS))
            code, details = await peer.status()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no credit" in details
        await wait_for_idle(host.address)


class SlowWorker(HashWorker):
    """Hangs in its third step, until the test has seen enough."""

    may_go_on = threading.Event()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        super().execute_model(scheduler_output)
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 3:
            self.may_go_on.wait(30)


async def test_heartbeats_of_a_hung_loop_stand_still(socket_dir: Path) -> None:
    SlowWorker.may_go_on.clear()
    async with running_engine(make_settings(socket_dir), SlowWorker) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, [1, 2], 4))
        beats: list[EngineFrame] = []
        while len([beat for beat in beats if beat.step == 2]) < 2:
            frame = await peer.read()
            assert frame is not None
            if not frame.slot and not frame.hello.peer_id:
                beats.append(frame)
        SlowWorker.may_go_on.set()
        await peer.read_until_finished([1])
    assert {frame.step for frame in beats} <= {0, 1, 2}


class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        super().execute_model(scheduler_output)
        if any(new.prompt_token_ids == [6, 6, 6] for new in scheduler_output.scheduled_new_reqs):
            raise RuntimeError("broken")


async def test_when_the_core_dies_every_live_request_hears_of_it(socket_dir: Path) -> None:
    async with running_engine(make_settings(socket_dir), FailingWorker) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, [1, 2], ENDLESS))
        await peer.read_tokens()
        await peer.send(make_add(2, [6, 6, 6]))
        received = await peer.read_until_finished([1, 2])
        for slot in (1, 2):
            error = wire_errors.from_proto(received.finished[slot].error)
            assert isinstance(error, errors.Unavailable)
            assert error.retry_after is not None
        assert (await peer.status())[0] is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(30):
            assert isinstance(await host.failure.take(), errors.Unavailable), "not a bug: no traceback in the log"
