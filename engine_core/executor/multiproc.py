"""Runs workers in processes of their own: the core schedules while they compute, and can replace them when one ends."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from tokenloom.process.process_guard import is_ending
from tokenloom.process.rendezvous_dir import RendezvousDir

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError, PeerLostError, WeightsDamagedError, WorkerLostError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.model_info import ModelInfo
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from ..kv_transfer.kv_transport import KVPool
from ..wire.array_arena import ArrayArena
from ..wire.frames import Decoder, Frame, encode, from_raw, to_raw
from .executor import PoolSpec
from .ranks import RankPool, RankPools, joined_results, merged_info, most_in_flight, rank_config
from .worker_launch import (
    PoolCall,
    SampleCall,
    WorkerCall,
    WorkerErrorKind,
    WorkerProcess,
    WorkerReply,
    WorkerRequestType,
)


class WorkerWatch:
    """Watches the workers of one executor, each from a thread, until others take their place or it is closed.

    Attributes:
        fd: Readable once a worker has ended.
        failure: Which worker ended, and how; empty while all run. One that a signal ended is named before others.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.failure = ""
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)  # notified of each end
        self._running = set[int]()  # the ids of those whose end was not reported
        self._was_killed = False  # whether a signal has ended a worker
        self._generation = 0  # of workers: the end of an earlier one is no failure
        self._on_failure: Callable[[], None] = lambda: None

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when a worker has ended. It may not call this object."""
        with self._lock:
            self._on_failure = callback
            if self.failure:
                callback()

    def begin(self, workers: Sequence[WorkerProcess]) -> None:
        """Watch these workers."""
        self._running = {worker.pid for worker in workers}
        for worker in workers:
            threading.Thread(
                target=self._wait, args=(worker, self._generation), name="worker-monitor", daemon=True
            ).start()

    def end(self) -> None:
        """Watch none any more: the present workers are about to be ended."""
        with self._lock:
            self._generation += 1
            self.failure, self._was_killed = "", False
            with contextlib.suppress(BlockingIOError):
                while os.read(self.fd, 64):
                    pass

    def was_killed(self, seconds: float) -> bool:
        """Return whether a signal has ended a worker: once one has, once none is about to end, or after so many
        seconds."""
        with self._ended:
            self._ended.wait_for(lambda: self._was_killed or not any(map(is_ending, self._running)), seconds)
            return self._was_killed

    def close(self, reason: str) -> None:
        """Release the descriptors, and let ``reason`` be the failure unless there is one. No worker may be watched."""
        self.failure = self.failure or reason
        os.close(self.fd)
        os.close(self._write_fd)

    def _wait(self, worker: WorkerProcess, generation: int) -> None:
        status = worker.wait()
        with self._lock:
            # Replacing a failed worker ends the healthy ones of its generation too, which is no failure.
            if generation != self._generation:
                return
            is_killed = status < 0 and not self._was_killed
            if is_killed or not self.failure:
                self.failure = f"worker {worker.rank} ended with status {status}"
            self._was_killed |= is_killed
            self._running.discard(worker.pid)
            os.write(self._write_fd, b"\0")
            self._on_failure()
            self._ended.notify_all()


_DAMAGED = WorkerErrorKind.DAMAGED
_END_SECONDS = 2.0
"""How long the end of a killed worker may take to be reported once another rank has failed."""
_ANSWER_MS = 100
"""How long the last answer of a rank that has ended may take from the kernel to this thread."""
_SEND_POLL_MS = 20
"""How often to check, while a worker takes no message, that its process still runs."""


class RemoteOutput:
    """Promises the output of a step, which is read from the socket when it is asked for."""

    def __init__(self, executor: "MultiprocExecutor", call_id: int) -> None:
        self._executor, self._call_id = executor, call_id

    def result(self) -> ModelRunnerOutput:
        executor = self._executor
        replies = executor.wait(self._call_id, executor.sampling_ranks)
        output = replies[executor.sampling_ranks.index(executor.output_rank)].output
        assert output is not None
        return output


class MultiprocExecutor:
    """Implements ``Executor``. Every rank gets every message, in the same order.

    Attributes:
        output_rank: The rank that samples and reports the tokens.
        sampling_ranks: The ranks that answer each step: the output rank; where KV moves all of them, because no block
            may be read or filled by a transfer while any rank still computes with it.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str], *, world_size: int | None = None) -> None:
        """Start the workers with ``command``, to which ``--address ADDRESS`` is appended. ``world_size``: how many;
        None: as many as ``config`` says.

        Raises ``ValueError`` for a configuration that does not work, ``ExecutorFailedError`` when a worker does not
        start.
        """
        parallel = config.parallel
        self.max_concurrent_batches = most_in_flight(config)
        self._config, self._command = config, command
        self._world_size = world_size = world_size or parallel.world_size
        assert parallel.world_size in (1, world_size), "each worker waits for those that the configuration names"
        self._rendezvous: RendezvousDir | None = None  # where the workers find each other, until they have
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = Decoder(WorkerReply)
        self._call_ids = itertools.count(1)
        self._is_closing = False
        self._watch = WorkerWatch()
        self._arena = ArrayArena(0)
        moves_kv = bool(config.kv.transports or config.kv.tier)
        self._pools = RankPools(world_size, parallel.prefill_context_parallel_size) if moves_kv else None
        self._pool: KVPool | None = None
        self.output_rank = parallel.output_rank
        self.sampling_ranks = range(world_size) if moves_kv else range(self.output_rank, self.output_rank + 1)
        self._kv_cache: KVCacheConfig | None = None
        self._is_profiled = False
        self._weights = ""  # the checkpoint that replaced the configured one
        self.workers: list[WorkerProcess] = []
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> None:
        """Start the workers, with nothing that earlier ones have left."""
        self._replies: list[dict[int, WorkerReply]] = [{} for _ in range(self._world_size)]  # read, not yet asked for
        self._late: dict[int, int] = {}  # calls that were given up, and how many ranks have not answered yet
        self._poller = zmq.Poller()
        self._poller.register(self._watch.fd, zmq.POLLIN)
        self._arena = ArrayArena(self._config.parallel.array_arena_bytes, num_readers=self._world_size)
        pool_fd = self._pools.fd if self._pools is not None else None
        if self._config.parallel.world_size > 1:
            self._rendezvous = RendezvousDir()
        self.workers = []
        for rank in range(self._world_size):  # one after the other: those that have started end if one cannot
            self.workers.append(WorkerProcess(self._context, self._command, rank, self._arena.address, pool_fd))
        for worker in self.workers:
            worker.shake_hands(self._config_of(worker.rank))
            self._poller.register(worker.socket, zmq.POLLIN)
        self._watch.begin(self.workers)

    def _config_of(self, rank: int) -> EngineConfig:
        rendezvous = str(self._rendezvous.path / "store") if self._rendezvous is not None else ""
        return rank_config(self._config, rank, rendezvous, self._world_size)

    def replace_workers(self) -> None:
        """End all workers and start others, which load the same weights and have empty KV pools. No step may be in
        flight.

        Raises ``ExecutorFailedError`` if the workers' pools are mapped by others, or if a worker does not start.
        """
        if self._pools is not None:
            raise ExecutorFailedError("workers whose KV moves between engines cannot be replaced")
        self._end_workers()
        try:
            self._start()
            # The same calls in the same order as at start, because ranks exchange tensors in them and would wait for
            # each other.
            self.load_model()
            if self._is_profiled:
                self.determine_available_memory()
            if self._kv_cache is not None:
                self.initialize_kv_cache(self._kv_cache)
            if self._weights:
                self.collective_rpc("reload_weights", self._weights)
        except ExecutorFailedError:
            raise
        except Exception as error:  # the system refuses processes, sockets and threads, too
            raise ExecutorFailedError(f"a worker cannot be replaced: {error}") from error

    def load_model(self) -> ModelInfo:
        # Ranks meet over files of the rendezvous while they load; afterwards no rank needs the folder.
        models = msgspec.convert(self._prepare("load_model"), list[ModelInfo])
        self._remove_rendezvous()
        return merged_info(models, self.output_rank, self._config.parallel.prefill_context_parallel_size)

    def determine_available_memory(self) -> int:
        self._is_profiled = True
        return min(msgspec.convert(self._prepare("determine_available_memory"), list[int]))

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        self._kv_cache = kv_cache
        if pool is None:
            warm_ups = msgspec.convert(self._prepare("initialize_kv_cache", kv_cache), list[WarmUp])
        else:
            parts = self._make_pools(kv_cache, pool)
            warm_ups = [part.warm_up for part in parts]
        return max(warm_ups, key=lambda warm_up: warm_up.seconds)

    def _make_pools(self, kv_cache: KVCacheConfig, pool: PoolSpec) -> list[RankPool]:
        assert self._pools is not None, "the configuration at start moves KV"
        call_id = next(self._call_ids)
        self._send(WorkerRequestType.POOL, PoolCall(call_id, kv_cache, self._pools.allocate(pool.nbytes)))
        replies = self.wait(call_id, range(len(self.workers)))
        parts = [msgspec.convert(from_raw(reply.result), RankPool) for reply in replies]
        self._pool = self._pools.merge(parts)
        return parts

    def kv_pool(self) -> KVPool:
        assert self._pool is not None, "initialize_kv_cache comes first, with a PoolSpec"
        return self._pool

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._send(WorkerRequestType.EXECUTE, scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        call_id = next(self._call_ids)
        self._send(WorkerRequestType.SAMPLE, SampleCall(call_id, grammar))
        return RemoteOutput(self, call_id)

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        replies = self._replies_of(self._call(method, args), range(len(self.workers)))
        answers = [_answer_of(rank, reply) for rank, reply in enumerate(replies)]
        if any(isinstance(answer, ExecutorFailedError) for answer in answers):
            self._await_end()
        results = joined_results(answers)
        if method == "reload_weights":
            self._weights = str(args[0])
        return results

    def _prepare(self, method: str, *args: object) -> list[object]:
        """Call a method that workers make once, as they start: any error ends them, so the first one is raised. Ranks
        that exchange tensors with the one that failed may never answer."""
        call_id = self._call(method, args)
        replies = self._replies_of(call_id, range(len(self.workers)), fails_fast=True)
        return [from_raw(reply.result) for reply in replies]

    def check_health(self, timeout: float) -> None:
        call_id = self._call("check_health", ())
        try:
            self.wait(call_id, range(len(self.workers)), timeout)
        except TimeoutError:
            silent = [rank for rank, replies in enumerate(self._replies) if replies.pop(call_id, None) is None]
            self._late[call_id] = len(silent)
            workers = ", ".join(map(str, silent))
            raise ExecutorFailedError(f"no answer within {timeout:g} s from worker {workers}") from None
        except ValueError as error:
            raise ExecutorFailedError(f"a worker failed: {error}") from error

    def on_failure(self, callback: Callable[[], None]) -> None:
        self._watch.on_failure(callback)

    def shutdown(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        failure = self._watch.failure
        self._end_workers()
        self._context.destroy(linger=0)
        if self._pools is not None:
            self._pools.close()
        self._watch.close(failure or "the executor was shut down")

    def _end_workers(self) -> None:
        self._watch.end()
        for worker in self.workers:
            worker.stop()
        self._arena.close()
        self._remove_rendezvous()

    def _remove_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.remove()
            self._rendezvous = None

    def wait(self, call_id: int, ranks: Sequence[int], timeout: float | None = None) -> list[WorkerReply]:
        """Return the answers of these ranks.

        Raises a rank's error, ``ExecutorFailedError`` if a worker ended, or ``TimeoutError`` after ``timeout`` seconds.
        """
        replies = self._replies_of(call_id, ranks, timeout)
        failed = [(rank, reply) for rank, reply in zip(ranks, replies, strict=True) if reply.error_kind is not None]
        # Damaged weights first: the other ranks may have failed because that one has ended.
        for rank, reply in sorted(failed, key=lambda each: each[1].error_kind is not _DAMAGED) if failed else ():
            self._raise_failure(rank, reply)
        return replies

    def _replies_of(
        self, call_id: int, ranks: Sequence[int], timeout: float | None = None, *, fails_fast: bool = False
    ) -> list[WorkerReply]:
        """Return the answers of these ranks, those with errors included. Raises as :meth:`wait` otherwise, and with
        ``fails_fast`` the first error that comes."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        while not all(call_id in self._replies[rank] for rank in ranks):
            self._check_alive()
            if ends_at is None:
                self._poller.poll()
            elif not self._poller.poll(math.ceil(max(0.0, ends_at - time.monotonic()) * 1e3)):
                raise TimeoutError
            self._read()
            self._check_unasked(call_id, ranks)
            if fails_fast:
                for rank in ranks:
                    if (reply := self._replies[rank].get(call_id)) is not None:
                        self._raise_failure(rank, reply)
        return [self._replies[rank].pop(call_id) for rank in ranks]

    def _read(self) -> None:
        for worker in self.workers:
            while worker.socket.poll(0):
                reply = self._decoder.decode(worker.socket.recv_multipart())
                if reply.call_id not in self._late:
                    self._replies[worker.rank][reply.call_id] = reply
                elif self._late[reply.call_id] > 1:
                    # An answer that comes after its health check gave up must not be taken for that of a later call.
                    self._late[reply.call_id] -= 1
                else:
                    del self._late[reply.call_id]

    def _check_unasked(self, call_id: int, ranks: Sequence[int]) -> None:
        """Raise the error of a rank that was not asked: such a rank answers only if it failed."""
        for rank, replies in enumerate(self._replies):
            if rank not in ranks:
                for failed_id in [failed_id for failed_id in replies if failed_id <= call_id]:
                    self._raise_failure(rank, replies.pop(failed_id))

    def _send(self, kind: WorkerRequestType, message: object) -> None:
        self._check_alive()
        with self._arena.lend() as loan:
            frames = [kind.value, *encode(message, loan)]
            for worker in self.workers:
                self._send_to(worker, frames)

    def _send_to(self, worker: WorkerProcess, frames: list[Frame]) -> None:
        """Send to one worker. A plain send would wait forever for one that has just ended."""
        while True:
            try:
                worker.socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self._check_alive()
                worker.socket.poll(_SEND_POLL_MS, zmq.POLLOUT)

    def _call(self, method: str, args: Sequence[object]) -> int:
        """Send a call to every rank. Returns its id."""
        call_id = next(self._call_ids)
        self._send(WorkerRequestType.CALL, WorkerCall(call_id, method, [to_raw(arg) for arg in args]))
        return call_id

    def _raise_failure(self, rank: int, reply: WorkerReply) -> None:
        if (error := _error_of(rank, reply)) is not None:
            if isinstance(error, ExecutorFailedError) and not isinstance(error, WeightsDamagedError):
                self._await_end()
            raise error

    def _await_end(self) -> None:
        """Raise ``WorkerLostError`` if a rank has failed because another one was killed."""
        # The system closes the connections of a killed process before it reports its end: another rank fails first,
        # and the core would end instead of replacing the workers. A rank whose step fails ends too, but with a status
        # of its own (``WorkerProc``): other workers would fail like it.
        if len(self.workers) > 1:
            if self._watch.was_killed(_END_SECONDS):
                self._check_alive()
            self._await_answers()
        self._check_weights()

    def _await_answers(self) -> None:
        """Wait a moment for what ranks have answered before they ended: ZMQ's own thread reads it. Raises as
        :meth:`_check_weights`."""
        answers = zmq.Poller()
        for worker in self.workers:
            answers.register(worker.socket, zmq.POLLIN)
        ends_at = time.monotonic() + _ANSWER_MS / 1e3
        # Not only for the first one: of three ranks, the next may be another that fails because the cause has ended.
        while (left := ends_at - time.monotonic()) > 0 and answers.poll(math.ceil(left * 1e3)):
            self._check_weights()

    def _check_weights(self) -> None:
        """Raise ``WeightsDamagedError`` if that is why a rank has failed: the others fail because it has ended."""
        self._read()
        for rank, replies in enumerate(self._replies):
            for reply in replies.values():
                if isinstance(error := _error_of(rank, reply), WeightsDamagedError):
                    raise error

    def _check_alive(self) -> None:
        if self._watch.failure:
            if not self._is_closing:
                self._check_weights()
            raise WorkerLostError(self._watch.failure)


def _answer_of(rank: int, reply: WorkerReply) -> object | Exception:
    return _error_of(rank, reply) or from_raw(reply.result)


def _error_of(rank: int, reply: WorkerReply) -> Exception | None:
    if reply.error_kind is None:
        return None
    if reply.error_kind is WorkerErrorKind.VALUE:
        return ValueError(reply.error)
    if reply.error_kind is WorkerErrorKind.PEER:
        return PeerLostError(f"worker {rank}: {reply.error}")
    kind = WeightsDamagedError if reply.error_kind is _DAMAGED else ExecutorFailedError
    return kind(f"worker {rank}: {reply.error}")
