"""Steps of a worker's process whose output comes later than the next step."""

import contextlib
import itertools
import select
import threading
from collections.abc import Iterator

import pytest
import zmq

from tests.engine_core.executor.test_threaded import Promise
from tests.engine_core.helpers import make_config
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.executor.worker_launch import (
    SampleCall,
    WorkerErrorKind,
    WorkerInit,
    WorkerReply,
    WorkerRequestType,
)
from tokenloom.engine_core.executor.worker_process import LateOutputs, WorkerProc
from tokenloom.engine_core.wire.frames import Decoder, encode

STEP = SchedulerOutput([], CachedRequestData([], [], [], {}), {"a": 1}, 1, [], [])


class Broken(Promise):
    def result(self) -> ModelRunnerOutput:
        super().result()
        raise RuntimeError("the device is gone")


class LateWorker:
    """Promises each output for when the next step has begun. The third fails late; the fifth step ends the thread."""

    def __init__(self) -> None:
        self.began = [threading.Event() for _ in range(6)]
        self.num_steps = 0

    def execute_model(self, scheduled: SchedulerOutput) -> None:
        self.began[self.num_steps].set()
        self.num_steps += 1
        if self.num_steps == 5:
            raise SystemExit

    def sample_tokens(self, grammar: object) -> Promise:
        kind = Broken if self.num_steps == 3 else Promise
        return kind(ModelRunnerOutput(["a"], [[self.num_steps]]), self.began[self.num_steps])


def _run(worker: WorkerProc) -> None:
    with contextlib.suppress(SystemExit):
        worker.run()


@pytest.fixture
def socket() -> Iterator["zmq.Socket[bytes]"]:
    """The executor's end of the socket of a worker that runs on a thread."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as near, context.socket(zmq.PAIR) as far:
        near.bind("inproc://worker")
        far.connect("inproc://worker")
        worker = WorkerProc(LateWorker(), far, WorkerInit(make_config(), 0, None, None))  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: _run(worker))
        thread.start()
        yield near
        thread.join(10)
        assert not thread.is_alive()
        worker._late.close()


def test_a_step_begins_before_the_output_of_the_last_one_is_there(socket: "zmq.Socket[bytes]") -> None:
    decoder = Decoder[WorkerReply](WorkerReply)
    replies = []
    for call_id in range(1, 6):
        socket.send_multipart([WorkerRequestType.EXECUTE.value, *encode(STEP)])
        if call_id < 5:
            socket.send_multipart([WorkerRequestType.SAMPLE.value, *encode(SampleCall(call_id, None))])
        if call_id > 1 and call_id < 5:  # the output before is there now, and was not before
            assert socket.poll(10_000)
            replies.append(decoder.decode(socket.recv_multipart()))
    assert [reply.call_id for reply in replies] == [1, 2, 3]
    assert [reply.output.sampled_token_ids for reply in replies if reply.output is not None] == [[[1]], [[2]]]
    assert replies[2].error_kind is WorkerErrorKind.FAILED
    assert "the device is gone" in replies[2].error


def test_outputs_come_in_order() -> None:
    late, events = LateOutputs(), [threading.Event(), threading.Event()]
    for call_id, event in zip(itertools.count(7), events, strict=False):
        late.add(call_id, Promise(ModelRunnerOutput(["a"], [[call_id]]), event))
    assert list(late.take()) == []
    events[1].set()
    assert list(late.take()) == []
    events[0].set()
    found: list[int] = []
    while late:
        assert select.select([late.fd], [], [], 10)[0]
        found += [output.result().sampled_token_ids[0][0] for _, output in late.take()]
    assert found == [7, 8]
    late.close()
