"""Runs the engine core in a process of its own: an input thread, and the busy loop, which sends its own outputs.

client ──socket──▶ input thread ──▶ input_queue ───▶ busy loop ──socket──▶ client
                           └─────▶ aborts queue ─────┘ (also read while a step's results are processed)
"""

import contextlib
import enum
import gc
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import zmq

from tokenloom.process.process_guard import ProcessGuard

from ..control.step_watchdog import StepWatchdog, inherited_cells
from ..core import EngineCore
from ..core_calls import CoreCalls
from ..data.config import EngineConfig, ParallelConfig
from ..data.errors import ExecutorFailedError, GroupLostError, PeerLostError, WeightsDamagedError, WorkerLostError
from ..data.handshake import CoreFailed, CoreHello, CoreInit
from ..data.messages import AcceptTokens, ArrivedRows, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..data_parallel.group_address import Meeting
from ..data_parallel.group_hub import open_meeting
from ..data_parallel.group_link import GroupLink, join_group, listening_workers
from ..data_parallel.wave_loop import WaveLoop, WaveState
from ..executor.executor import Executor
from ..kv_transfer.core_kv import CoreKV, make_core_kv
from ..kv_transfer.kv_service import KVThread
from ..kv_transfer.kv_transport import KVTransport
from ..wire.array_arena import ArenaReader
from ..wire.frames import Decoder, encode
from .core_io import InputItem, InputMessage, InputThread, OutputSocket
from .core_launch import RemoteCore, remove_sockets

log = logging.getLogger(__name__)

_HUB_LOST: Final = (RequestType.GROUP, None)
_GROUP_ENDED: Final = (RequestType.GROUP, False)


class ProcState(enum.Enum):
    """States of the busy loop."""

    RUNNING = enum.auto()
    REQUESTED = enum.auto()
    """A shutdown was requested: live requests finish, new ones are refused."""
    SHUTTING_DOWN = enum.auto()
    """No request is left."""


class EngineCoreProc:
    """Runs an :class:`EngineCore` for one client. One thread calls :meth:`run`; any thread may wake it."""

    def __init__(self, core: EngineCore, connection: socket.socket, arrays: ArenaReader | None = None) -> None:
        """``connection``: to the client. ``arrays``: shared memory that may hold arrays of requests."""
        self._core = core
        self._calls = CoreCalls(core)
        self._input = InputThread(connection, arrays)
        self._output = OutputSocket(connection)
        self._replacement = WorkerReplacement(core)
        self._num_losses = 0  # of workers, counted by their executor's threads
        self._num_replaced = 0
        self._group: WaveLoop | None = None
        self._link: GroupLink | None = None
        self._parallel: ParallelConfig | None = None
        self.state = ProcState.RUNNING

    def start(self) -> None:
        """Start to receive the client's messages, and to be woken by the core's other threads."""
        self._core.on_update(self.wake)
        self._core.executor.on_failure(self.executor_failed)
        self._input.start()

    def join_group(self, link: GroupLink, config: ParallelConfig) -> None:
        """Compute in waves with the other ranks of a data-parallel group. To be called after :meth:`start`."""
        self._group, self._link, self._parallel = WaveLoop(self._core, config, link), link, config
        self._calls.utilities.add("resize_group", self._group.resize)
        inputs = self._input.input_queue
        link.start(
            lambda message, connection: inputs.put((RequestType.GROUP, (message, connection))),
            lambda is_final: inputs.put(_GROUP_ENDED if is_final else _HUB_LOST),
        )

    def request_shutdown(self) -> None:
        """Make :meth:`run` return once the live requests have finished."""
        if self.state is ProcState.RUNNING:
            self.state = ProcState.REQUESTED
            self._input.input_queue.put((RequestType.WAKEUP, None))

    def wake(self) -> None:
        """Make :meth:`run` look for work if it waits for input."""
        with contextlib.suppress(queue.Full):  # with a full queue it does not wait
            self._input.input_queue.put_nowait((RequestType.WAKEUP, None))

    def executor_failed(self) -> None:
        """Make :meth:`run` replace a worker that has ended, if it waits for input; a step that waits for the executor
        notices it on its own."""
        self._num_losses += 1
        with contextlib.suppress(queue.Full):
            self._input.input_queue.put_nowait((RequestType.EXECUTOR_FAILED, None))

    def run(self) -> None:
        """Step until a requested shutdown. If the core fails, notify the client and raise the failure."""
        try:
            while self._process_inputs():
                group = self._group
                outputs = self._step() if group is None else group.turn(self._step, self._compute_dummy)
                if outputs is not None:
                    self._output.send(outputs)
                if group is not None:
                    self._settle_group(group)
        except BaseException as error:
            # The client has to learn of an interrupt as well, or it waits for outputs of a core that is gone.
            self._output.send_dead(str(error) if isinstance(error, WeightsDamagedError) else "")
            raise

    def _step(self) -> EngineCoreOutputs | None:
        try:
            # A lost worker: requests go back to the queue with their tokens: with the hash worker streams continue 0.2
            # to 0.4 s after the kill.
            return self._calls.step(self._input.take_aborts)
        except WorkerLostError as error:
            self._replace_workers(error)
        except PeerLostError as error:
            self._rejoin_peers(error)
        return None

    def _rejoin_peers(self, error: PeerLostError) -> None:
        """Let the workers join those of the other ranks anew; the requests of the lost step are computed again."""
        if self._group is None:
            raise error
        if self._parallel is not None and self._parallel.world_size > 1:
            # They may be in different calls: some wait for each other's sums, and others have given the step up.
            log.info("%s; the workers of this engine are started again", error)
            with self._away_from_group():
                self._core.replace_workers()
            self._num_replaced = self._num_losses  # a worker whose step has failed ends, too
        else:
            self._group.lost_peer(error)

    @contextlib.contextmanager
    def _away_from_group(self) -> Iterator[None]:
        """Leave the group, if the experts are spread over its ranks, and come again with the workers that the block has
        started: those of the other ranks would look for the ended ones all the time."""
        group, link, config = self._group, self._link, self._parallel
        if group is None or link is None or config is None or not config.spreads_experts_over_engines:
            yield
            return
        group.break_off()
        link.step_back()
        yield
        link.come_again(listening_workers(link.address, config, self._core))

    def _compute_dummy(self) -> None:
        """Compute the batch of a rank without requests, with which the others of its group compute theirs."""
        try:
            self._core.executor.collective_rpc("execute_dummy_batch")
        except WorkerLostError as error:
            self._replace_workers(error)
        except PeerLostError as error:
            self._rejoin_peers(error)

    def _replace_workers(self, lost: WorkerLostError) -> None:
        with self._away_from_group():
            self._replacement.replace(lost)
        # All losses so far are answered by the replacement, also those whose message is still in the queue.
        self._num_replaced = self._num_losses

    def _process_inputs(self) -> bool:
        """Process all messages that have arrived; without work, wait for one. Returns False to shut down."""
        inputs = self._input.input_queue
        group = self._group
        while not (self._core.has_work() if group is None else group.has_work()):
            if self.state is ProcState.SHUTTING_DOWN:
                return False
            # What came before the request to shut down is still in the queue: it is served first. Other ranks of a
            # group may need steps of this one although it has no requests.
            is_needed = self._core.has_requests() or (group is not None and not group.waves.is_resting)
            if self.state is not ProcState.RUNNING and not is_needed and inputs.empty():
                self.state = ProcState.SHUTTING_DOWN
                return False
            self._process(inputs.get())
        # Only what has arrived by now: a client that sends without a pause must not keep the core from stepping.
        for _ in range(inputs.qsize()):
            self._process(inputs.get())
        return True

    def _process(self, item: InputItem) -> None:
        kind, message = item
        outputs: EngineCoreOutputs | None = None
        if kind is RequestType.ADD:
            assert isinstance(message, EngineCoreRequest)
            outputs = self._calls.add(message)
        elif kind is RequestType.ABORT:
            assert isinstance(message, list)
            outputs = self._calls.abort(message)
        elif kind is RequestType.ACCEPT:
            assert isinstance(message, AcceptTokens)
            outputs = self._calls.accept(message)
        elif kind is RequestType.ROWS:
            assert isinstance(message, ArrivedRows)
            outputs = self._calls.take_rows(message)
        elif kind is RequestType.UTILITY:
            assert isinstance(message, UtilityCall)
            self._calls.call(message, self._output.send)
            if self._core.damage is not None:
                raise self._core.damage
        elif kind is RequestType.EXECUTOR_FAILED:
            if self._num_losses > self._num_replaced:  # otherwise a step has noticed it
                self._replace_workers(WorkerLostError("a worker process ended unexpectedly"))
        elif kind in (RequestType.GROUP, RequestType.START_DP_WAVE):
            try:
                self._process_group(message)
            except WorkerLostError as error:  # while it joined those of the other ranks
                self._replace_workers(error)
        else:
            assert kind is RequestType.WAKEUP, kind
            if self.state is not ProcState.RUNNING:
                self._calls.refuse_new()
                if self._group is not None and self._group.waves.state is WaveState.LOST:
                    self._core.scheduler.abort_all()  # this rank ends without a group: they go on at other engines
        if outputs is not None:
            self._output.send(outputs)
        if self._group is not None:
            self._settle_group(self._group)

    def _process_group(self, message: InputMessage) -> None:
        if self._group is None:
            return  # a start for an engine without waves is another's mistake
        if message is None:
            self._hub_lost(self._group)
        elif message is False:
            raise GroupLostError("the data-parallel group is lost: its hub, beside rank 0, has not come back")
        elif isinstance(message, int):
            self._group.waves.start(message)
        elif self._link is not None and isinstance(message, tuple) and self._link.is_current(message[1]):
            self._group.take(message[0])

    def _hub_lost(self, group: WaveLoop) -> None:
        """Wait for another hub; the link looks for it."""
        group.break_off()
        if self.state is ProcState.RUNNING:
            log.info("the hub of the data-parallel group has ended; requests wait for the next one")
        else:
            self._core.scheduler.abort_all()  # this rank ends without a group: they go on at other engines

    def _settle_group(self, group: WaveLoop) -> None:
        """Let requests, pauses and the group's messages take effect, and pass on what has changed."""
        group.settle()
        if (outputs := group.take_updates()) is not None:
            self._output.send(self._calls.stamp(outputs))


def run_engine_core(
    handshake_address: str,
    make_executor: Callable[[EngineConfig], Executor],
    make_transports: Callable[[EngineConfig], Sequence[KVTransport]] = lambda config: (),
    command: Sequence[str] = (),
) -> int:
    """Run a core's process: HELLO → INIT → READY, then the busy loop. Returns the exit status.

    ``command``: starts a core, as for :class:`.core_launch.CoreProcess`, where the configuration puts it elsewhere.
    """
    guard = ProcessGuard(on_orphaned=lambda: remove_sockets(handshake_address))
    guard.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link: GroupLink | None = None
    try:
        with context.socket(zmq.PAIR) as handshake:
            handshake.connect(handshake_address)
            init = _shake_hands(handshake)
            if init.config.parallel.data_parallel_backend == "ray" and not init.is_placed:
                return _run_on_ray(handshake, init, command, guard)
            try:
                kv = make_core_kv(init.config, make_transports(init.config))
                watchdog = StepWatchdog(inherited_cells(init.pulse_fd) if init.pulse_fd is not None else None)
                core = EngineCore(init.config, make_executor(init.config), kv, watchdog=watchdog)
                meeting = None if init.meeting is None else Meeting(*init.meeting)
                link = join_group(init.config.parallel, core, meeting) if core.has_waves else None
            except Exception as error:
                handshake.send_multipart(encode(_failed(error)))
                return 1
            # Once the model is loaded: a full collection of the core then takes 4 to 8 ms instead of 25 to 34, which is
            # a step.
            _freeze_heap()
            arrays = ArenaReader(init.arrays) if init.arrays is not None else None
            proc = EngineCoreProc(core, socket.socket(fileno=init.connection_fd), arrays)
            proc.start()
            if link is not None:
                proc.join_group(link, init.config.parallel)
            kv_thread = _start_kv_thread(context, init, kv)
            # Only now: until here SIGTERM ends the process at once, since nothing is served yet.
            guard.on_terminate = proc.request_shutdown
            # Last, when every thread runs: the client sends requests as soon as it has this.
            handshake.send_multipart(encode(core.ready))
        if kv_thread is None:
            context.term()  # its two threads have nothing left to do
        return _run(proc, core, kv_thread)
    finally:
        if link is not None:
            link.close()
        context.term()  # waits until the KV thread's last messages are sent


def _run_on_ray(handshake: zmq.Socket[bytes], init: CoreInit, command: Sequence[str], guard: ProcessGuard) -> int:
    """Run the core in an actor of a Ray cluster, and stand here for it. Returns its exit status."""
    parallel, meeting, hub = init.config.parallel, None, None
    try:
        remote = RemoteCore(init.config)
        if parallel.data_parallel_address:  # only a core knows whether its model has experts; without them nobody comes
            meeting, hub = open_meeting(parallel, remote.host)
        answer = remote.start(command, meeting)
    except Exception as error:
        handshake.send_multipart(encode(_failed(error)))
        return 1
    guard.on_terminate = remote.stop
    handshake.send_multipart(answer)
    try:
        return remote.relay(socket.socket(fileno=init.connection_fd))
    finally:
        if hub is not None:
            hub.close()


def _shake_hands(handshake: zmq.Socket[bytes]) -> CoreInit:
    handshake.send_multipart(encode(CoreHello(os.getpid())))
    return Decoder[CoreInit](CoreInit).decode(handshake.recv_multipart())


def _failed(error: Exception) -> CoreFailed:
    """Log a failed start and return the message for the client. A ``ValueError`` means a wrong configuration or
    checkpoint; the client reports it, so it is not logged as an error here."""
    is_permanent = isinstance(error, ValueError)
    log.log(logging.DEBUG if is_permanent else logging.ERROR, "the engine core cannot start", exc_info=error)
    return CoreFailed(str(error) if is_permanent else f"{type(error).__name__}: {error}", permanent=is_permanent)


def _start_kv_thread(context: zmq.Context[zmq.Socket[bytes]], init: CoreInit, kv: CoreKV | None) -> KVThread | None:
    if kv is None or kv.service is None or not init.kv_address:
        return None
    thread = KVThread(context, init.kv_address, kv.service)
    thread.start()
    return thread


def _freeze_heap() -> None:
    """Exclude the objects of start-up from later garbage collections, because they are never freed."""
    # A full collection happens between two tokens of all streams; of a frozen heap it takes 4 to 8 ms instead of 25 to
    # 34. Python's thresholds stay: under bursts of 1,000 requests no full one was due in 1,500 steps.
    # Collected before freezing, or the garbage of start-up would stay for ever.
    gc.collect()
    # A full collection of the core then takes 4 to 8 ms instead of 25 to 34, in which every request waits for its
    # token. Its longest steps, 32 to 90 ms, are others: those in which a burst of requests arrives.
    gc.freeze()


def _run(proc: EngineCoreProc, core: EngineCore, kv_thread: KVThread | None) -> int:
    try:
        proc.run()
    except (GroupLostError, WeightsDamagedError) as error:
        log.error("%s", error)
        return 1
    except Exception:
        log.exception("the engine core failed")
        return 1
    finally:
        core.shutdown()
        if kv_thread is not None:
            kv_thread.stop()
    return 0


# A request whose computation kills workers is retried once here. After that the core ends, and the output processor
# blames a request that was alone.
AGAIN_SECONDS = 30.0
"""A worker that ends so soon after a replacement ends the core: what it computes may be the cause."""
_ATTEMPTS = 2


class WorkerReplacement:
    """Belongs to the thread that steps the core."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: returns seconds."""
        self._core = core
        self._clock = clock
        self._replaced_at: float | None = None

    def replace(self, lost: ExecutorFailedError) -> None:
        """Replace the workers, of which one has ended. Raises ``lost`` if that happened a short while ago too, and
        ``ExecutorFailedError`` if no worker can be started."""
        if self._replaced_at is not None and self._clock() - self._replaced_at < AGAIN_SECONDS:
            raise lost
        log.error("%s; it is replaced, and its requests are computed anew", lost)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._core.replace_workers()
                break
            except ExecutorFailedError as error:
                if attempt == _ATTEMPTS:
                    raise
                log.error("%s; trying once more", error)
        self._replaced_at = self._clock()
        log.info("the workers were replaced")
