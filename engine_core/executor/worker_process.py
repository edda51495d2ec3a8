"""Runs a worker in a process of its own: one thread executes the messages of the executor in order, another waits for
outputs that the device has not finished yet."""

import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import zmq

from tokenloom.process.process_guard import ProcessGuard

from ..data.config import EngineConfig
from ..data.errors import PeerLostError, WeightsDamagedError
from ..data.scheduler_output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from ..kv_cache.pool_memory import PoolMemory
from ..wire.array_arena import ArenaReader
from ..wire.frames import Decoder, Frame, encode, to_raw
from .executor import call_worker
from .ranks import RankPool, make_rank_pool
from .worker import Worker
from .worker_launch import (
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
    remove_socket,
)

log = logging.getLogger(__name__)


class LateOutputs:
    """Waits for outputs on a thread, in order, and makes a descriptor readable when one is there.

    It holds as many as the executor has steps in flight.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Future[ModelRunnerOutput]]] = deque()
        self._thread: ThreadPoolExecutor | None = None  # most workers have no late outputs
        # A descriptor and not a condition: the worker waits for this and for its ZMQ socket in one poll.
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)

    def __len__(self) -> int:
        """Return how many outputs were not taken."""
        return len(self._waiting)

    @property
    def fd(self) -> int:
        """The descriptor, which is readable when an output is there."""
        return self._reading.fileno()

    def add(self, call_id: int, pending: PendingOutput) -> None:
        """Wait for the output of a call from now on."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="late-outputs")
        future = self._thread.submit(pending.result)
        self._waiting.append((call_id, future))
        future.add_done_callback(self._wake)

    def take(self) -> Iterator[tuple[int, Future[ModelRunnerOutput]]]:
        """Yield the calls whose outputs or errors are there, in order."""
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(1 << 10)
        # In order, although a later output may be there: the core takes results in the order of its steps.
        while self._waiting and self._waiting[0][1].done():
            yield self._waiting.popleft()

    def close(self) -> None:
        """Wait for the outputs that are left, and drop them."""
        if self._thread is not None:
            self._thread.shutdown()
        self._reading.close()
        self._writing.close()

    def _wake(self, _: "Future[ModelRunnerOutput]") -> None:
        with contextlib.suppress(BlockingIOError):  # it is readable already
            self._writing.send(b"\0")


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
            # That the sampling rank has answered does not say that the others are done, and a transfer must not read or
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
    for own, kind in ((PeerLostError, WorkerErrorKind.PEER), (WeightsDamagedError, WorkerErrorKind.DAMAGED)):
        if isinstance(error, own):
            return WorkerReply(call_id, error_kind=kind, error=str(error))
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
