"""The KV thread of a core's process: answers the front's calls on leases, and drives loads from other engines.

It has its own socket to the front, so it answers while a step runs. It serves this engine's pool over its transports,
and records which of them other engines may be reading through.
"""

import contextlib
import math
import os
import queue
import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import zmq

from tokenloom.process.fall_backs import OF_PROCESS

from ..data.config import KVConfig
from ..data.kv_groups import common_layout
from ..data.kv_messages import (
    KVAcquire,
    KVAnswer,
    KVCall,
    KVEvent,
    KVOwnersLeft,
    KVProgress,
    KVRelease,
    KVRemoteProgress,
    KVRenew,
    KVTarget,
    KVVerdict,
    KVVerify,
)
from ..wire.frames import Decoder, encode
from .block_loads import CopyTask, LoadOrder, LoadResult, Loads
from .failpoints import Failpoints
from .kv_copier import NUM_THREADS, KVCopier
from .kv_transport import KVPool, KVTransferError, KVTransport, are_compared
from .leases import LeaseTable, random_id

Command = Callable[[], None]
_MOST_SUMS = 4096
"""Readers whose checksums are kept: far more than release within the seconds in which a call is repeated."""


class KVService:
    """Owns the leases and loads of one engine.

    The KV thread calls ``receive``, ``run`` and ``take_events``. The thread that steps uses ``start_load``, ``give_up``
    and ``leases``. Commands of other threads are queued for the KV thread, and ``on_wake`` is called.

    Attributes:
        leases: The leases held for other engines.
        on_wake: Called by any thread when :meth:`run` should be called soon.
        on_update: Called by any thread when a load or a lease has ended.
        results: Loads that have ended; at most one per request that waits.
    """

    def __init__(
        self,
        config: KVConfig,
        transports: Iterable[KVTransport],
        failpoints: Failpoints,
        *,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], bytes] = random_id,
    ) -> None:
        """``executor``: its threads copy blocks; None for two of its own. ``new_id`` draws ids of acquisitions."""
        self.leases = LeaseTable(config.lease_seconds, clock=clock, new_id=new_id)
        self.on_wake: Command = _nothing
        self.on_update: Command = _nothing
        self.results: deque[LoadResult] = deque()
        self._config = config
        self._transports = list(transports)
        self._by_name = {transport.name: transport for transport in self._transports}
        self._failpoints = failpoints
        self._executor = executor or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-copy")
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()  # a few for each load
        self._events: deque[KVEvent] = deque()
        self._following: list[KVProgress] = []  # one for each reader that follows a prefill
        self._endpoints = Endpoints(self._transports, clock)
        self._pool: KVPool | None = None
        self._layout = ""  # what the pool's has in common with others
        self._compared_layout = ""  # with the plugins that move its blocks
        self._copier: KVCopier | None = None
        self._loads = Loads(
            copy=self._copy,
            interrupt=self._interrupt,
            send=self._events.append,
            finish=self._finish_load,
            timeout_seconds=config.load_timeout_seconds,
            clock=clock,
        )
        self._sums: OrderedDict[bytes, array[int]] = OrderedDict()  # of the last readers that released, for repetitions
        self._closed = threading.Event()

    def register(self, pool: KVPool) -> None:
        """Serve the pool from now on: readers read it, and loads fill it."""
        self._pool = pool
        self._layout = common_layout(pool.layout)
        self._compared_layout = self._config.layout_of(self._layout)
        self._endpoints.serve(pool)
        self._copier = KVCopier(
            pool, self._transports, self._executor, self._failpoints, checksum=self._config.checksum
        )

    def close(self) -> None:
        """End copies and transports. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._copier is not None:
            self._copier.close()
        for transport in self._transports:
            transport.close()
        self._executor.shutdown()

    # For the thread that steps

    def start_load(self, order: LoadOrder) -> None:
        """Start a load; it ends as one of ``results``."""
        self._post(lambda: self._loads.start(order))

    def give_up(self, request_id: str) -> None:
        """Make the front release the lease of a request that does not want it (any more)."""
        self._post(lambda: self._loads.give_up(request_id))

    def leases_changed(self) -> None:
        """Wake the KV thread after leases were published or dropped, if a reader follows one."""
        if self._following:
            self.on_wake()

    def has_updates(self) -> bool:
        """Return whether a load or a lease has ended."""
        return bool(self.results) or self.leases.any_freed()

    # For the KV thread

    def receive(self, call: KVCall) -> None:
        """Answer a call of the front, at once or in a later :meth:`run`."""
        match call:
            case KVRemoteProgress():
                self._loads.progress(call.request_id, call.tokens_ready)
            case KVVerdict():
                if not self._failpoints.fires("verdict_lost"):
                    self._loads.verdict(call)
            case KVOwnersLeft():
                if self._copier is not None:
                    self._copier.forget_owners(call.owners)
            case KVProgress():
                self._following.append(call)
            # This thread answers renewals of every other lease: half a second of nixl's start would let some of them
            # end.
            case KVAcquire() if (name := self._unmade_transport(call)) is not None:
                self._make_endpoint(name, call)
            case KVRelease() if self._config.checksum is not False:
                self._release_with_checksums(call)
            case _:
                self._answer(call, [])

    def run(self) -> float | None:
        """Do what is due. Returns the seconds until :meth:`run` must be called again, None for no limit."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command()
        times = [seconds for seconds in (self.leases.expire(), self._loads.expire()) if seconds is not None]
        # After expire(): a reader that follows a lease which has just ended gets the reason now, not at its next
        # timeout.
        self._following = [call for call in self._following if not self._answer_progress(call)]
        if self.leases.any_freed():
            self.on_update()
        return min(times, default=None)

    def take_events(self) -> list[KVEvent]:
        """Return the messages for the front, in order."""
        events: list[KVEvent] = []
        while self._events:
            event = self._events.popleft()
            events.append(event)
            if isinstance(event, KVVerify) and self._failpoints.fires("verify_twice"):
                events.append(event)
        return events

    def _answer(self, call: KVAcquire | KVRenew | KVRelease, checksums: list[int]) -> None:
        try:
            match call:
                case KVAcquire():
                    answer = self._acquire(call)
                case KVRenew():
                    answer = KVAnswer(call.call_id, ttl_seconds=self.leases.renew(call.acquisition_id))
                    self._endpoints.renew(call.acquisition_id)
                case KVRelease():
                    self._endpoints.release(call.acquisition_id)
                    self.leases.release(call.acquisition_id, call.generations)
                    answer = KVAnswer(call.call_id, valid=True, checksums=checksums)
        except KVTransferError as error:
            answer = KVAnswer(call.call_id, failure=error.reason, detail=error.detail)
        self._events.append(answer)

    def _acquire(self, call: KVAcquire) -> KVAnswer:
        assert self._pool is not None, "register comes first"
        # The name of a layout holds dtype, heads and groups: bytes of another one would be read as plausible KV.
        layout = self._compared_layout
        if call.kv_layout != layout or self._failpoints.fires("wrong_layout"):
            raise KVTransferError("layout", f"the owner's KV layout is {layout}, the reader's is {call.kv_layout}")
        name = "" if call.is_own else self._endpoints.choose(call.transports)
        endpoint = b"" if call.is_own else self._endpoints.find(name) if name is not None else None
        if name is None or endpoint is None:
            raise KVTransferError("transport", f"the owner serves {self._endpoints.names}, not {call.transports}")
        compares = not call.is_own and are_compared(self._config.checksum, self._by_name.get(name))
        lease, ttl = self.leases.acquire(call.lease_id, call.prompt_digest, compares=compares)
        if self._failpoints.fires("lease_expires"):
            self.leases.end_early(lease.acquisition_id)
        # Before the reader has the answer: it may connect at once, and nixl's owner has to make progress for that.
        self._endpoints.attend(lease.acquisition_id, name)
        target = KVTarget(
            acquisition_id=lease.acquisition_id,
            transport=name,
            endpoint=endpoint,
            block_ids=lease.block_ids,
            generations=lease.generations,
            num_tokens=lease.num_tokens,
            layout="" if self._layout == self._pool.layout else self._pool.layout,
        )
        return KVAnswer(call.call_id, target=target, ttl_seconds=ttl)

    def _unmade_transport(self, call: KVAcquire) -> str | None:
        """Return the transport for a reader if it serves on demand and no reader has asked for it yet."""
        name = self._endpoints.choose(call.transports)
        return name if name is not None and self._endpoints.find(name) is None else None

    def _make_endpoint(self, name: str, call: KVAcquire) -> None:
        """Make an endpoint on a thread of the executor, because it takes long; then answer the call."""

        def make() -> None:
            self._endpoints.make(name)
            self._post(lambda: self.receive(call))

        with contextlib.suppress(RuntimeError):  # the service is closed, and the executor with it
            self._executor.submit(make)

    def _release_with_checksums(self, call: KVRelease) -> None:
        assert self._copier is not None, "register comes first"
        try:
            block_ids = self.leases.blocks_to_compare(call.acquisition_id)
        except KVTransferError:
            # The lease has ended; the table has the reason. A call that is repeated, because its answer was lost, gets
            # the same sums: without any, the reader would use blocks that it has not compared.
            self._answer(call, list(self._sums.get(call.acquisition_id, ())))
            return
        if not block_ids:
            self._answer(call, [])
            return
        self._copier.checksums(block_ids, lambda checksums: self._post(lambda: self._compared(call, checksums)))

    def _compared(self, call: KVRelease, checksums: list[int]) -> None:
        # Of two calls that overlap the first one counts: the second may have read blocks that have a new holder.
        sums = self._sums.setdefault(call.acquisition_id, array("I", checksums))
        if len(self._sums) > _MOST_SUMS:
            self._sums.popitem(last=False)
        self._answer(call, list(sums))

    def _answer_progress(self, call: KVProgress) -> bool:
        try:
            tokens_ready, num_tokens = self.leases.progress(call.acquisition_id)
        except KVTransferError as error:
            self._events.append(KVAnswer(call.call_id, failure=error.reason, detail=error.detail))
            return True
        if tokens_ready <= call.tokens_seen:
            return False
        self._events.append(KVAnswer(call.call_id, tokens_ready=tokens_ready, num_tokens=num_tokens))
        return True

    def _copy(self, task: CopyTask) -> None:
        assert self._copier is not None, "register comes first"
        self._copier.copy(task, lambda checksums, error: self._post(lambda: self._loads.copied(task, checksums, error)))

    def _interrupt(self, target: KVTarget) -> None:
        assert self._copier is not None, "register comes first"
        self._copier.interrupt(target)

    def _finish_load(self, result: LoadResult) -> None:
        self.results.append(result)
        self.on_update()

    def _post(self, command: Command) -> None:
        self._commands.put(command)
        self.on_wake()


def _nothing() -> None:
    pass


READ_SECONDS = 12.0
"""How long a reader is attended after its last Acquire or Renew. Readers renew every 5 seconds."""
LINGER_SECONDS = 1.0
"""How long a reader is attended after its Release: a copy that it gave up may still run."""


class Endpoints:
    """Maps the names of transports to the endpoints that readers get. ``make`` may be called by any thread, everything
    else by the KV thread."""

    def __init__(self, transports: Iterable[KVTransport], clock: Callable[[], float] = time.monotonic) -> None:
        self._transports = list(transports)
        self._clock = clock
        self._pool: KVPool | None = None
        self._endpoints: dict[str, bytes] = {}
        self._waiting: dict[str, KVTransport] = {}
        """Transports that begin to serve when a reader first asks for them."""
        self._lock = threading.Lock()  # held while a transport begins to serve, so that it begins once
        self._read_until: dict[bytes, tuple[str, float]] = {}
        """By acquisition: the transport and until when its reader is attended. Past entries are dropped."""

    def serve(self, pool: KVPool) -> None:
        """Serve the pool over all transports that need not wait for a reader."""
        self._pool = pool
        if pool.apart is not None:
            self._endpoints.update(pool.apart.endpoints)
            return
        for transport in self._transports:
            # nixl's agent with its polling thread kept 0.7 to 2 cores of an idle prefill and decode pair busy; made on
            # demand and without that thread, the pair uses 0.03.
            if transport.serves_on_demand:
                if pool.device is not None:
                    continue  # such a transport registers memory of the host
                self._waiting[transport.name] = transport
            elif (endpoint := transport.serve(pool)) is not None:
                self._endpoints[transport.name] = endpoint

    @property
    def names(self) -> list[str]:
        """The names of the transports that serve this pool, or will when a reader asks for them."""
        return sorted([*self._endpoints, *self._waiting])

    def choose(self, names: Sequence[str]) -> str | None:
        """Return the first of a reader's transports that serves this pool, or will; None if none does."""
        return next((name for name in names if name in self._endpoints or name in self._waiting), None)

    def find(self, name: str) -> bytes | None:
        """Return the endpoint of a transport; None if :meth:`make` must be called first."""
        return self._endpoints.get(name)

    def make(self, name: str) -> None:
        """Begin to serve over a transport that waits for its first reader. A transport that fails is not chosen again.

        Takes about half a second for nixl.
        """
        with self._lock:
            if (transport := self._waiting.get(name)) is None:
                return  # another reader asked at the same time
            assert self._pool is not None, "serve comes first"
            try:
                if (endpoint := transport.serve(self._pool)) is not None:
                    self._endpoints[name] = endpoint
            except Exception as error:  # each library has errors of its own
                OF_PROCESS.begin("kv_transport", f"{name}: {error}")
            del self._waiting[name]

    def attend(self, acquisition_id: bytes, name: str) -> None:
        """Note that a reader acquired a lease and may read through this transport from now on."""
        self._set(acquisition_id, name, READ_SECONDS)

    def renew(self, acquisition_id: bytes) -> None:
        """Note that a reader still reads."""
        if (known := self._read_until.get(acquisition_id)) is not None:
            self._set(acquisition_id, known[0], READ_SECONDS)

    def release(self, acquisition_id: bytes) -> None:
        """Note that a reader has ended its copy, or will soon."""
        if (known := self._read_until.get(acquisition_id)) is not None:
            self._set(acquisition_id, known[0], LINGER_SECONDS)

    def _set(self, acquisition_id: bytes, name: str, seconds: float) -> None:
        transport = next((each for each in self._transports if each.name == name), None)
        if transport is None or not transport.serves_on_demand:
            return
        now = self._clock()
        # Readers that died never release, so old entries are dropped whenever a new one comes.
        self._read_until = {key: value for key, value in self._read_until.items() if value[1] > now}
        self._read_until[acquisition_id] = (name, now + seconds)
        transport.attend(max(until for key, until in self._read_until.values() if key == name) - now)


class KVThread:
    """Runs a :class:`KVService` over one end of a ZMQ PAIR."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, service: KVService) -> None:
        self._service = service
        self._socket = context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.connect(address)
        self._calls: Decoder[KVCall] = Decoder(KVCall)
        # A full pipe means that the thread will wake anyway.
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="core-kv", daemon=True)
        self._stopping = False
        service.on_wake = self._wake

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The service must be closed before, so that no other thread wakes this one."""
        self._stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        with self._socket:
            timeout: float | None = 0.0
            while not self._stopping:
                try:
                    # Rounded up: rounded down, the last millisecond before a lease ends would be a busy loop of polls
                    # with timeout 0.
                    poller.poll(None if timeout is None else math.ceil(timeout * 1000))
                    timeout = self._turn()
                except zmq.ContextTerminated:
                    return

    def _turn(self) -> float | None:
        with contextlib.suppress(BlockingIOError):
            # Before the work: a wake-up that arrives during it stays in the pipe and leads to another turn.
            os.read(self._wake_read, 4096)
        while self._socket.poll(0):
            self._service.receive(self._calls.decode(self._socket.recv_multipart()))
        # After all calls are read, so that answers see what the thread that steps has queued by now.
        timeout = self._service.run()
        for event in self._service.take_events():
            self._socket.send_multipart(encode(event))
        return timeout
