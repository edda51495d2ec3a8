"""The clients for an event loop: over a socket, and with the core on a thread."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.engine_core.data.test_embedding_rows import expected, make_mixed, make_wide
from tests.engine_core.helpers import make_config, make_pooling, make_request
from tests.engine_core.processes import failing_core, has_ended
from tests.loop_clock import settle
from tokenloom.engine_core.client import async_core_client
from tokenloom.engine_core.client.async_core_client import AsyncCoreClient, AsyncMPClient, PendingCalls
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import PoolingTask
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.errors import (
    EngineDamagedError,
    EngineDeadError,
    EngineStartError,
    NotSentError,
    UtilityError,
)
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, UtilityCall
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.engine_core.wire.frames import IOV_MAX, MAX_INLINE_BYTES
from tokenloom.services.engine.core.workers import CORE_COMMAND

CONFIG = msgspec.structs.replace(make_config(), worker=WorkerConfig(model="", worker="hash", step_seconds=0.002))

MakeClient = Callable[[EngineConfig], AsyncCoreClient]


def inproc(config: EngineConfig) -> AsyncCoreClient:
    return AsyncInprocClient(config, UniProcExecutor(HashWorker(config)))


def in_process(config: EngineConfig) -> AsyncMPClient:
    return AsyncMPClient(config, CORE_COMMAND)


@pytest.fixture(params=[inproc, in_process], ids=["inproc", "process"])
def make_client(request: pytest.FixtureRequest) -> MakeClient:
    make: MakeClient = request.param
    return make


@pytest.fixture
async def client(make_client: MakeClient) -> AsyncIterator[AsyncCoreClient]:
    client = make_client(CONFIG)
    await client.start()
    yield client
    await client.close()


async def collect(client: AsyncCoreClient, count: int) -> dict[str, list[int]]:
    token_ids: dict[str, list[int]] = {}
    while count:
        for output in (await client.get_output()).outputs:
            token_ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            count -= output.finish_reason is not None
    return token_ids


async def test_requests_come_while_others_run(client: AsyncCoreClient) -> None:
    await client.add_request(make_request("a", [1, 2, 3], max_tokens=20))
    await client.get_output()
    await client.add_request(make_request("b", [4, 5], max_tokens=5))
    token_ids = await collect(client, 2)
    assert token_ids["a"][-19:] == expected_tokens([1, 2, 3], 20)[-19:]
    assert token_ids["b"] == expected_tokens([4, 5], 5)


async def test_after_an_abort_the_statistics_are_those_of_an_idle_engine(client: AsyncCoreClient) -> None:
    for name in "abc":
        await client.add_request(make_request(name, [ord(name)] * 9, max_tokens=200))
    await client.get_output()
    await client.abort_requests(["a", "b", "c", "never was"])

    async def idle() -> EngineCoreOutputs:
        while True:
            outputs = await client.get_output()
            stats = outputs.scheduler_stats
            if stats is not None and outputs.num_requests_added == 3 and not stats.num_running + stats.num_waiting:
                return outputs

    outputs = await idle()
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.kv_usage == 0.0


async def test_utilities_are_answered_while_outputs_are_read(client: AsyncCoreClient) -> None:
    reader = asyncio.create_task(collect(client, 1))
    assert await client.call_utility("reset_prefix_cache") is True
    with pytest.raises(UtilityError, match="unknown utility"):
        await client.call_utility("system", "ls")
    await client.add_request(make_request("a", [1], max_tokens=2))
    assert await reader == {"a": expected_tokens([1], 2)}


async def test_a_core_that_cannot_start_says_why(make_client: MakeClient) -> None:
    client = make_client(make_config(max_model_len=9999))
    with pytest.raises(EngineStartError, match="max_model_len is 9999"):
        await client.start()
    await client.close()


async def test_a_closed_client_answers_nobody(client: AsyncCoreClient) -> None:
    waiting = asyncio.create_task(client.get_output())
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    with pytest.raises(EngineDeadError):
        await waiting
    with pytest.raises(EngineDeadError):
        await client.add_request(make_request("a", [1]))
    with pytest.raises(EngineDeadError):
        await client.call_utility("reset_prefix_cache")


async def test_cancelling_a_read_loses_no_later_output(client: AsyncCoreClient) -> None:
    waiting = asyncio.create_task(client.get_output())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.add_request(make_request("a", [1], max_tokens=3))
    assert await collect(client, 1) == {"a": expected_tokens([1], 3)}


async def test_cancelling_a_start_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import sys; sys.stdin.read()")
    client = AsyncMPClient(CONFIG, command=["python3", str(script)])
    start = asyncio.create_task(client.start())
    while (pid := client.pid) is None:  # noqa: ASYNC110  # the process is spawned by a thread
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await client.close()
    assert has_ended(pid)


async def test_a_killed_process_is_noticed_by_everyone_who_waits() -> None:
    client = in_process(CONFIG)
    await client.start()
    assert client.pid is not None
    waiting = asyncio.create_task(client.get_output())
    await asyncio.sleep(0)
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        with pytest.raises(EngineDeadError, match="status -9"):
            await waiting
    with pytest.raises(EngineDeadError):
        await client.add_request(make_request("a", [1]))
    await client.close()


class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        raise RuntimeError("broken")


async def test_a_failed_step_is_the_end(tmp_path: Path) -> None:
    for client in (
        AsyncInprocClient(CONFIG, UniProcExecutor(FailingWorker(CONFIG))),
        AsyncMPClient(CONFIG, command=failing_core(tmp_path, "raise RuntimeError('broken')")),
    ):
        await client.start()
        await client.add_request(make_request("a", [1]))
        with pytest.raises(EngineDeadError, match="the engine core failed"):
            await client.get_output()
        with pytest.raises(EngineDeadError):
            await client.add_request(make_request("b", [1]))
        await client.close()


@pytest.mark.parametrize("is_busy", [False, True])
async def test_a_core_whose_weights_are_damaged_says_so_also_to_an_event_loop_that_was_busy(
    tmp_path: Path, is_busy: bool
) -> None:
    errors = "__import__('tokenloom.engine_core.data.errors', fromlist=['*'])"
    failure = f"raise {errors}.WeightsDamagedError('bytes 0 to 7 of model.a have changed')"
    client = AsyncMPClient(CONFIG, command=failing_core(tmp_path, failure))
    await client.start()
    await client.add_request(make_request("a", [1]))
    reading = asyncio.create_task(client.get_output())
    await settle()
    if is_busy:
        client._process.wait()  # both its last words and its end are there when the loop looks
    with pytest.raises(EngineDamagedError, match="bytes 0 to 7 of model"):
        await reading
    await client.close()


async def test_a_request_that_was_cancelled_before_it_was_sent_holds_no_memory() -> None:
    client = in_process(CONFIG)
    request = make_mixed("a", make_wide(0, 20))
    async with asyncio.timeout(30):  # without a reader ZMQ accepts only what its queues hold
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                while True:
                    await client.abort_requests(["nobody"])
        sending = asyncio.create_task(client.add_request(request))
        await asyncio.sleep(0)
        assert client._arena.num_lent == 1
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert client._arena.num_lent == 0
    await client.close()


def make_spans(request_id: str, count: int) -> EngineCoreRequest:
    """Return a request whose message has a frame for each of ``count`` spans of rows."""
    spans = [EmbedsSpan(2 * index, np.full((1, 128), index, np.float32)) for index in range(count)]
    return make_mixed(request_id, *spans, length=2 * count + 1)


async def start_wide() -> tuple[AsyncMPClient, int]:
    """Return a client of a core that computes long prompts in one step, and the size of its vocabulary."""
    config = make_config(max_model_len=4096, num_blocks=1500, budget=4096)
    client = in_process(msgspec.structs.replace(config, worker=CONFIG.worker))
    return client, (await client.start()).vocab_size


async def test_a_request_of_more_frames_than_one_call_takes_runs_as_any_other() -> None:
    client, vocab_size = await start_wide()
    async with asyncio.timeout(60):
        request = make_spans("spans", IOV_MAX + 76)
        await client.add_request(request)
        await client.add_request(make_request("plain", [1, 2, 3], max_tokens=3))
        token_ids = await collect(client, 2)
    assert token_ids == {"spans": expected(request, vocab_size), "plain": expected_tokens([1, 2, 3], 3)}
    await client.close()


async def test_more_pooled_results_than_one_call_takes_are_the_outputs_of_one_step() -> None:
    count = IOV_MAX + 126
    config = make_config(max_num_seqs=count, budget=16 * count, num_blocks=4 * count)
    client = in_process(msgspec.structs.replace(config, worker=CONFIG.worker))
    await client.start()
    found: dict[str, EngineCoreOutput] = {}
    steps: list[int] = []

    async def read() -> None:
        while len(found) < count:
            outputs = (await client.get_output()).outputs
            steps.append(len(outputs))
            found.update({output.request_id: output for output in outputs})

    async with asyncio.timeout(60):
        reading = asyncio.create_task(read())
        await client.call_utility("pause", "keep")  # all are there before the first step
        for index in range(count):
            await client.add_request(make_pooling(str(index), [index % 90 + 1] * 10, PoolingTask.TOKEN_EMBED))
        await client.call_utility("resume")
        await reading
    assert max(steps) > IOV_MAX
    for output in found.values():
        assert output.pooled is not None
        assert output.pooled.nbytes > MAX_INLINE_BYTES
    await client.close()


async def test_a_request_that_no_message_can_carry_fails_alone() -> None:
    client = in_process(CONFIG)
    await client.start()
    async with asyncio.timeout(60):
        wrong = msgspec.structs.replace(make_request("wrong", [1]), timeout_ns=2**64)
        with pytest.raises(NotSentError, match="ADD: OverflowError"):
            await client.add_request(wrong)
        await client.add_request(make_request("right", [1], max_tokens=3))
        assert await collect(client, 1) == {"right": expected_tokens([1], 3)}
    await client.close()


async def test_rows_of_a_request_that_was_cancelled_while_half_sent_are_not_replaced() -> None:
    """The core reads the rest of the message with the next one, and what it refers to must still be there."""
    client, vocab_size = await start_wide()
    assert client.pid is not None
    in_frames = [make_wide(50 + 8 * index, 8, index) for index in range(20)]  # more than the socket's buffer
    first = make_mixed("first", make_wide(0, 50, 1), *in_frames, length=300)
    second = make_mixed("second", make_wide(0, 50, 2), length=60)
    async with asyncio.timeout(60):
        os.kill(client.pid, signal.SIGSTOP)
        sending = asyncio.create_task(client.add_request(first))
        await asyncio.sleep(0)
        assert not sending.done()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert client._arena.num_lent == 1
        next_one = asyncio.create_task(client.add_request(second))
        await asyncio.sleep(0)
        os.kill(client.pid, signal.SIGCONT)
        await next_one
        token_ids = await collect(client, 2)
    assert token_ids == {request.request_id: expected(request, vocab_size) for request in (first, second)}
    await client.close()


async def test_a_call_is_sent_in_its_turn_though_its_caller_was_cancelled_before() -> None:
    calls, may_write, sent = PendingCalls(), asyncio.Lock(), list[str]()

    async def send(call: UtilityCall) -> None:
        async with may_write:
            sent.append(call.method)

    async with may_write:  # another message is being written
        pause, resume = (asyncio.create_task(calls.make(method, (), send)) for method in ("pause", "resume"))
        await asyncio.sleep(0)
        pause.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pause
    await settle()
    assert sent == ["pause", "resume"]
    calls.fail(EngineDeadError("the test has ended"))
    with pytest.raises(EngineDeadError):
        await resume
    assert not calls._waiting
    assert not calls._sending


async def test_closing_ends_calls_that_are_not_sent_and_the_task_that_sends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = AsyncMPClient(CONFIG, CORE_COMMAND, grace=0.1)
    monkeypatch.setattr(client, "_watch", lambda loop: None)  # as if the thread noticed the end later
    await client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(client.call_utility("pause", bytes(8 << 20))) for _ in range(3)]
    await settle()
    assert client._calls._sending is not None, "the first call fills the socket"
    await client.close()
    assert "utility-calls" not in {task.get_name() for task in asyncio.all_tasks()}
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDeadError] * 3


async def test_calls_are_sent_in_the_order_in_which_they_are_made() -> None:
    calls, sent, pause_may_go = PendingCalls(), list[str](), asyncio.Event()

    async def send(call: UtilityCall) -> None:
        if call.method == "pause":
            await pause_may_go.wait()
        sent.append(call.method)

    tasks = [asyncio.create_task(calls.make(method, (), send)) for method in ("pause", "resume")]
    await settle()
    pause_may_go.set()
    await settle()
    assert sent == ["pause", "resume"]
    calls.fail(EngineDeadError("the test has ended"))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, EngineDeadError) for error in errors)


async def test_a_call_that_cannot_be_sent_fails_alone_and_so_does_one_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_core_client, "_MAX_UNSENT", 2)
    calls, sent = PendingCalls(), list[str]()

    async def send(call: UtilityCall) -> None:
        if call.method == "first":
            raise NotSentError("it is too long")
        sent.append(call.method)

    first, second, third = (asyncio.create_task(calls.make(name, (), send)) for name in ("first", "second", "third"))
    with pytest.raises(NotSentError, match="too long"):
        await first
    with pytest.raises(NotSentError, match="2 calls wait"):
        await third
    assert sent == ["second"]
    calls.fail(EngineDeadError("the test has ended"))
    with pytest.raises(EngineDeadError):
        await second
    assert not calls._waiting


def test_a_client_that_is_dropped_with_unread_kv_calls_does_not_keep_its_process(tmp_path: Path) -> None:
    code = """
import asyncio, gc, sys, warnings
import msgspec, zmq
from tests.engine_core.client.test_async_core_client import CONFIG
from tokenloom.engine_core.client.async_core_client import AsyncMPClient
from tokenloom.engine_core.data.kv_messages import KVRenew
warnings.simplefilter("ignore")

async def main():
    kv = msgspec.structs.replace(CONFIG.kv, transports=("socket",))
    client = AsyncMPClient(msgspec.structs.replace(CONFIG, kv=kv), ())
    core = zmq.Context().socket(zmq.PAIR)
    core.linger, core.rcvhwm = 0, 1
    core.connect(client._process.kv_address)
    call = KVRenew(1, bytes(1 << 20))
    for _ in range(16):
        await asyncio.wait_for(client.kv_send(call), 5)

asyncio.run(main())
gc.collect()
print("ended")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout == "ended\n", ran.stderr
