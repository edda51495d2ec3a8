"""Runs a worker in a process of its own: one thread executes the messages of the executor in order."""

import logging
import os
from collections.abc import Callable

import msgspec
import zmq

from tokenloom.process.process_guard import ProcessGuard

from ..data.config import EngineConfig
from ..data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from ..kv_cache.pool_memory import PoolMemory
from ..wire.array_arena import ArenaReader
from ..wire.serialization import Decoder, Frame, encode, to_raw
from .executor import call_worker
from .late_outputs import LateOutputs
from .rank_pools import RankPool, make_rank_pool
from .worker import Worker
from .worker_launch import remove_socket
from .worker_messages import (
    PoolCall,
    SampleCall,
    WorkerCall,
    WorkerErrorKind,
    WorkerFailed,
    WorkerHello,
    WorkerInit,
    WorkerReady,
    WorkerReply,
    WorkerRequestType,
)

log = logging.getLogger(__name__)


class WorkerProc:
    """Runs one worker for one executor."""

    def __init__(self, worker: Worker, socket: "zmq.Socket[bytes]", init: WorkerInit) -> None:
        arrays = ArenaReader(init.arrays, init.rank) if init.arrays is not None else None
        self._worker = worker
        self._socket = socket
        self._rank = init.rank
        self._draws = init.rank == init.config.parallel.output_rank
        self._has_peers = init.config.parallel.world_size > 1
        self._pool_fd = init.pool_fd
        self._failure: Exception | None = None  # of the step executed last
        self._late = LateOutputs()
        self._steps = Decoder(SchedulerOutput, arrays)
        self._samples = Decoder(SampleCall, arrays)
        self._calls = Decoder(WorkerCall)
        self._pools = Decoder(PoolCall)

    def run(self) -> None:
        """Serve messages forever: the process ends when the executor kills it or has ended itself."""
        while True:
            if self._late:
                self._answer_late()
            kind, *body = self._socket.recv_multipart()
            match WorkerRequestType(kind):
                case WorkerRequestType.EXECUTE:
                    self._execute(self._steps.decode(body))
                case WorkerRequestType.SAMPLE:
                    self._sample(self._samples.decode(body))
                case WorkerRequestType.CALL:
                    self._call(self._calls.decode(body))
                case WorkerRequestType.POOL:
                    self._register_pool(self._pools.decode(body))

    def _execute(self, scheduled: SchedulerOutput) -> None:
        self._failure = None
        try:
            self._worker.execute_model(scheduled)
        except Exception as error:
            # EXECUTE has no answer of its own, so that the executor waits once a step; the answer to SAMPLE reports
            # this error.
            self._failure = error

    def _sample(self, call: SampleCall) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            output = self._worker.sample_tokens(call.grammar)
        except Exception as error:
            self._fail_step(call.call_id, error)
        else:
            if isinstance(output, ModelRunnerOutput):
                self._end_step(call.call_id, output)
            else:
                self._late.add(call.call_id, output)

    def _answer_late(self) -> None:
        """Answer with late outputs until a message is there, which may begin the next step."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._late.fd, zmq.POLLIN)
        while self._late and self._socket not in dict(poller.poll()):
            for call_id, output in self._late.take():
                if error := output.exception():
                    self._fail_step(call_id, error)
                else:
                    self._end_step(call_id, output.result())

    def _end_step(self, call_id: int, output: ModelRunnerOutput) -> None:
        if self._draws:
            self._reply(WorkerReply(call_id, output))
        elif self._pool_fd is not None:
            # That the drawing rank has answered does not say that the others are done, and a transfer must not read or
            # fill a block with which a rank still computes. So where KV moves, all of them answer.
            self._reply(WorkerReply(call_id))

    def _fail_step(self, call_id: int, error: BaseException) -> None:
        log.error("the step of worker %d failed", self._rank, exc_info=error)
        self._reply(_failed(call_id, error))
        if self._has_peers:
            raise SystemExit(1) from None  # the others wait for what this rank has not sent

    def _call(self, call: WorkerCall) -> None:
        self._answer(call.call_id, lambda: call_worker(self._worker, call.method, call.args))

    def _register_pool(self, call: PoolCall) -> None:
        self._answer(call.call_id, lambda: to_raw(self._make_pool(call)))

    def _answer(self, call_id: int, result: Callable[[], msgspec.Raw]) -> None:
        try:
            reply = WorkerReply(call_id, result=result())
        except Exception as error:
            reply = _failed(call_id, error)
        self._reply(reply)

    def _make_pool(self, call: PoolCall) -> RankPool:
        """Make the pool in this rank's part of the shared memory, and return where its blocks are."""
        assert self._pool_fd is not None, "the executor passes the memory at start if KV moves"
        memory = PoolMemory.of_part(self._pool_fd, self._rank * call.part_bytes, call.part_bytes)
        return make_rank_pool(self._worker, call.kv_cache, memory)

    def _reply(self, reply: WorkerReply) -> None:
        self._socket.send_multipart(encode(reply))


def _failed(call_id: int, error: BaseException) -> WorkerReply:
    is_callers = isinstance(error, (ValueError, TypeError, msgspec.MsgspecError))
    kind = WorkerErrorKind.VALUE if is_callers else WorkerErrorKind.FAILED
    return WorkerReply(call_id, error_kind=kind, error=str(error) if is_callers else f"{type(error).__name__}: {error}")


def run_worker(address: str, make_worker: Callable[[EngineConfig], Worker]) -> int:
    """Run a worker's process: exchange HELLO, INIT and READY, then serve its executor. Returns the exit status."""
    ProcessGuard(on_orphaned=lambda: remove_socket(address)).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        _send(socket, WorkerHello(os.getpid()))
        init = Decoder[WorkerInit](WorkerInit).decode(socket.recv_multipart())
        try:
            worker = make_worker(init.config)
        except Exception as error:
            log.debug("worker %d cannot start", init.rank, exc_info=True)
            _send(socket, WorkerFailed(str(error), is_config=isinstance(error, ValueError)))
            return 1
        _send(socket, WorkerReady())
        WorkerProc(worker, socket, init).run()
    raise AssertionError("a worker runs until its process is ended")


def _send(socket: "zmq.Socket[bytes]", message: object) -> None:
    frames: list[Frame] = encode(message)
    socket.send_multipart(frames)
