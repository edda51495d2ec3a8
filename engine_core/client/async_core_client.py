"""The client of an engine core for an event loop: the core runs in another process, reached over a stream socket."""

import asyncio
import contextlib
import functools
import itertools
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ..control.step_watchdog import Pulse, PulseMemory
from ..data.config import EngineConfig
from ..data.errors import EngineDeadError, NotSentError
from ..data.handshake import CoreReady
from ..data.kv_messages import KVCall, KVEvent
from ..data.messages import AcceptTokens, ArrivedRows, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..process.core_io import ENGINE_CORE_DEAD, death_of
from ..process.core_launch import CoreProcess
from ..wire.array_arena import ArrayArena, Loan
from ..wire.frames import NO_MEMORY, RETRY_SECONDS, Decoder, Frame, FrameReader, Pieces, encode, head, to_raw

# A front that falls behind stops reading; then the socket's buffer fills and the core waits, instead of this process
# growing.
_MAX_MESSAGES = 64
"""While so many messages wait for their receiver, the socket is not read, so that its sender waits."""


class AsyncSocket:
    """Receives and sends whole messages; each direction in the order of the calls.

    The end of the connection alone raises nothing: :meth:`fail` says why the peer has ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        """``connection``: the caller closes it, after :meth:`fail`."""
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader()
        self._messages: deque[list[Frame]] = deque()  # bounded by _MAX_MESSAGES and those of one read
        self._receiving, self._sending = asyncio.Lock(), asyncio.Lock()
        self._arrival: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._unsent: Pieces | None = None
        self._has_begun = False  # whether the first byte of it is sent
        self._on_begun: Callable[[], None] | None = None
        self._is_reading = self._is_writing = self._has_ended = False
        self._error: Exception | None = None

    async def receive(self) -> list[Frame]:
        """Return the frames of the next message. Cancelling loses no message. Raises the error of :meth:`fail`."""
        async with self._receiving:
            while True:
                if self._error is not None:
                    raise self._error
                if self._messages:
                    return self._messages.popleft()
                self._read_on()
                self._arrival = asyncio.get_running_loop().create_future()
                try:
                    await self._arrival
                finally:
                    self._arrival = None

    async def send(self, frames: Sequence[Frame], on_begun: Callable[[], None] | None = None) -> None:
        """Send a message; wait while the peer is too far behind.

        ``on_begun`` is called once the first byte is sent: from then on the whole message will be, even if its sender
        is cancelled. Raises the error of :meth:`fail`, and ``NotSentError`` for a message that cannot be sent.
        """
        try:
            message = Pieces([head(frames), *frames])
        except ValueError as error:
            raise NotSentError(str(error)) from None
        async with self._sending:
            if self._unsent is not None:
                await self._flush(self._unsent)  # the rest of a message whose sender was cancelled
            self._unsent, self._has_begun, self._on_begun = message, False, on_begun
            try:
                await self._flush(message)
            finally:
                if not self._has_begun:
                    self._unsent = None

    def last_message(self) -> list[Frame] | None:
        """Return the last message of a peer that has ended, if it was not received yet; None: there is none."""
        with contextlib.suppress(OSError, ValueError):
            while not self._has_ended:
                messages = self._reader.read(self._connection)
                self._has_ended = messages is None
                self._messages += messages or ()
        return self._messages[-1] if self._messages else None

    def fail(self, error: Exception) -> None:
        """End all operations with ``error``, later ones too. The first error wins.

        The event loop knows nothing of the connection afterwards, so that the caller may close it at once.
        """
        self._error = self._error or error
        self._pause_reading()
        self._pause_writing()
        _wake(self._arrival)
        _wake(self._writable)

    async def _flush(self, unsent: Pieces) -> None:
        while True:
            if self._error is not None:
                raise self._error
            try:
                is_sent = unsent.advance(self._connection.sendmsg(unsent.head()))
            except BlockingIOError:
                await self._wait_until_writable()
            except ConnectionError:
                # The end of the connection says nothing about its cause; the thread that waits for the process brings
                # the status.
                self._writable = asyncio.get_running_loop().create_future()
                await self._writable  # until :meth:`fail`
            except OSError as error:
                await self._retry_or_give_up(error)
            else:
                if not self._has_begun:
                    self._has_begun = True
                    if self._on_begun is not None:
                        self._on_begun()
                if is_sent:
                    self._unsent = None
                    return

    async def _retry_or_give_up(self, error: OSError) -> None:
        """Wait if the message may be sent later. Raises ``NotSentError`` if nothing of it was sent; a message that ends
        in its middle leaves a stream that no receiver understands."""
        if error.errno in NO_MEMORY:
            await asyncio.sleep(RETRY_SECONDS)
        elif not self._has_begun:
            raise NotSentError(f"the message cannot be sent: {error}") from None
        else:
            self.fail(EngineDeadError(f"a message to the engine core ended in its middle: {error}"))

    async def _wait_until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._writable = writable = loop.create_future()
        loop.add_writer(self._connection.fileno(), _wake, writable)
        self._is_writing = True
        try:
            await writable
        finally:
            self._pause_writing()
            self._writable = None

    def _read_on(self) -> None:
        if not self._is_reading and not self._has_ended:
            self._is_reading = True
            asyncio.get_running_loop().add_reader(self._connection.fileno(), self._on_readable)

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            asyncio.get_running_loop().remove_reader(self._connection.fileno())

    def _pause_writing(self) -> None:
        if self._is_writing:
            self._is_writing = False
            asyncio.get_running_loop().remove_writer(self._connection.fileno())

    def _on_readable(self) -> None:
        try:
            messages = self._reader.read(self._connection)
        except BlockingIOError:
            return
        except ValueError as error:
            self.fail(EngineDeadError(f"the engine core sent something else than messages: {error}"))
            return
        if messages is None:
            self._has_ended = True
            self._pause_reading()
            return
        self._messages += messages
        if self._messages:
            _wake(self._arrival)
        if len(self._messages) >= _MAX_MESSAGES:
            self._pause_reading()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


T = TypeVar("T")
Send = Callable[[UtilityCall], Awaitable[None]]

_MAX_UNSENT = 1024
"""So many calls may wait until a core that is behind reads them; a front that polls it adds some each second."""


class AsyncCoreClient(Protocol):
    """Describes what the engine service's front needs of a core.

    One task keeps reading :meth:`get_output`; utility calls are answered only while it does.
    """

    async def start(self) -> CoreReady:
        """Start the core. Raises ``EngineStartError``."""

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; a refusal arrives as its output. Raises ``EngineDeadError``, and ``NotSentError`` for a
        request that no message can carry."""

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without an output; unknown ids are ignored. Raises ``EngineDeadError``."""

    async def accept_tokens(self, message: AcceptTokens) -> None:
        """Send the tokens of a request that awaits them; unknown ids are ignored. Raises ``EngineDeadError``."""

    async def send_rows(self, message: ArrivedRows) -> None:
        """Send rows that the core has asked for. Raises ``EngineDeadError``, and ``NotSentError`` for rows that no
        message can carry."""

    async def start_wave(self, wave: int) -> None:
        """Begin a wave that another rank of the data-parallel group has begun. Raises ``EngineDeadError``."""

    async def get_output(self) -> EngineCoreOutputs:
        """Wait for the outputs of the next step. Raises ``EngineDeadError``."""

    async def call_utility(self, method: str, *args: object) -> object:
        """Call one of the core's utilities. Raises ``UtilityError`` if it fails, ``EngineDeadError``."""

    async def kv_send(self, call: KVCall) -> None:
        """Send a message to the core's KV thread, which needs ``KVConfig.transports``. Raises ``EngineDeadError``."""

    async def kv_receive(self) -> KVEvent:
        """Wait for the next message of the KV thread. Only one task may read. Raises ``EngineDeadError``."""

    async def close(self) -> None:
        """End the core. Idempotent."""


class PendingCalls:
    """Sends utility calls, and matches their answers to their callers."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._unsent = deque[tuple[UtilityCall, Send]]()  # bounded by _MAX_UNSENT
        self._sending: asyncio.Task[None] | None = None  # while there are unsent calls
        self._waiting: dict[int, asyncio.Future[object]] = {}  # bounded by the callers that wait

    async def make(self, method: str, args: Sequence[object], send: Send) -> object:
        """Send a call and wait for its answer. Calls are sent in the order in which they are made, each also if its
        caller is cancelled meanwhile.

        Raises ``NotSentError`` if too many calls wait to be sent, and what ``send`` raises.
        """
        if len(self._unsent) >= _MAX_UNSENT:
            raise NotSentError(f"{len(self._unsent)} calls wait to be sent to the engine core")
        call = UtilityCall(next(self._ids), method, [to_raw(arg) for arg in args])
        future = self._waiting[call.call_id] = asyncio.get_running_loop().create_future()
        # Callers note what a call changes when they make it. With a pause that was dropped before its first byte was
        # written, or that overtook a resume, an engine would show another state than its core has. So one task sends
        # all calls: with a task for each, the order would be that in which the event loop runs them.
        self._unsent.append((call, send))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name="utility-calls")
        try:
            return await future
        finally:
            del self._waiting[call.call_id]

    def take(self, outputs: EngineCoreOutputs) -> bool:
        """Return whether ``outputs`` was an answer; if so, pass it to the caller that waits for it."""
        if (answer := outputs.utility_output) is None:
            return False
        future = self._waiting.get(answer.call_id)
        if future is not None and not future.done():
            try:
                future.set_result(answer.value())
            except Exception as error:
                future.set_exception(error)
        return True

    def fail(self, error: Exception) -> None:
        """Fail all calls that wait."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        """End the task that sends; calls that are not sent yet never are. To be called after :meth:`fail`."""
        self._unsent.clear()
        if (sending := self._sending) is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self) -> None:
        try:
            while self._unsent:
                call, send = self._unsent.popleft()
                try:
                    await send(call)
                except Exception as error:
                    future = self._waiting.get(call.call_id)
                    if future is not None and not future.done():
                        future.set_exception(error)
        finally:
            self._sending = None


class AsyncMPClient:
    """Runs the core in a process of its own, because a busy loop in this process would delay every stream."""

    def __init__(self, config: EngineConfig, command: Sequence[str], *, grace: float = 5.0) -> None:
        """``command``: as for :class:`CoreProcess`; ``grace``: seconds until :meth:`close` kills the core."""
        self._config = config
        self._grace = grace
        self._process = CoreProcess(command)
        self._arena = ArrayArena(config.parallel.request_arena_bytes)
        self._pulse = PulseMemory()
        self._socket = AsyncSocket(self._process.connection)
        self._context: zmq.asyncio.Context | None = None  # it has two threads, which only KV needs
        if config.kv.transports:
            self._context = zmq.asyncio.Context()
            self._kv = self._context.socket(zmq.PAIR)
            # When a client is collected that was dropped without :meth:`close`, ZMQ would wait without end for a core
            # that does not take its KV calls: a run of the explorer hung so for an hour, and a process would at its
            # exit.
            self._kv.linger = 0
            self._kv.bind(self._process.kv_address)
        self._decoder = Decoder(EngineCoreOutputs)
        self._kv_events: Decoder[KVEvent] = Decoder(KVEvent)
        self._calls = PendingCalls()
        self._dead: EngineDeadError | None = None
        # Operations on the KV socket, which would never end if the core died.
        self._waits: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The id of the core's process."""
        return self._process.pid

    def pulse(self) -> Pulse | None:
        """Return whether the core's steps end in time; None on systems without the memory for it."""
        return self._pulse.read()

    def kill(self, reason: str) -> None:
        """Kill the core: every operation fails with ``EngineDeadError`` and this reason."""
        self._fail(EngineDeadError(reason))
        self._process.kill()

    async def start(self) -> CoreReady:
        try:
            ready = await asyncio.to_thread(self._process.start, self._config, self._arena.address, self._pulse.fd)
        except BaseException:
            self._process.kill()  # also ends the wait in the thread if this task was cancelled
            raise
        loop = asyncio.get_running_loop()
        # A core that is killed sends no message. The KV socket of ZMQ would go on waiting for it to come back, so its
        # process is watched.
        threading.Thread(target=self._watch, args=(loop,), name="core-watch", daemon=True).start()
        return ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        if not request.prompt_embeds:
            await self._send(RequestType.ADD, request)
            return
        with self._arena.lend() as loan:
            await self._send(RequestType.ADD, request, loan)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        await self._send(RequestType.ABORT, list(request_ids))

    async def accept_tokens(self, message: AcceptTokens) -> None:
        await self._send(RequestType.ACCEPT, message)

    async def send_rows(self, message: ArrivedRows) -> None:
        with self._arena.lend() as loan:
            await self._send(RequestType.ROWS, message, loan)

    async def start_wave(self, wave: int) -> None:
        await self._send(RequestType.START_DP_WAVE, wave)

    async def get_output(self) -> EngineCoreOutputs:
        while True:
            frames = await self._socket.receive()
            if frames[0] == ENGINE_CORE_DEAD:
                self._fail(death_of(frames))
                assert self._dead is not None
                raise self._dead
            outputs = self._decoder.decode(frames)
            if not self._calls.take(outputs):
                return outputs

    async def call_utility(self, method: str, *args: object) -> object:
        return await self._calls.make(method, args, functools.partial(self._send, RequestType.UTILITY))

    async def kv_send(self, call: KVCall) -> None:
        assert self._config.kv.transports, "this core transfers no KV"
        frames = encode(call)
        await self._unless_dead(lambda: self._kv.send_multipart(frames))

    async def kv_receive(self) -> KVEvent:
        assert self._config.kv.transports, "this core transfers no KV"
        return self._kv_events.decode(await self._unless_dead(self._kv.recv_multipart))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._process.stop, self._grace)
        self._fail(EngineDeadError("the client was closed"))
        await self._calls.close()
        self._process.connection.close()
        if self._context is not None:
            self._context.destroy(linger=0)
        self._arena.close()
        self._pulse.close()

    async def _send(self, kind: RequestType, message: object, loan: Loan | None = None) -> None:
        try:
            frames = encode(message, loan)
        except (msgspec.MsgspecError, ArithmeticError, TypeError, ValueError, NotImplementedError) as error:
            raise NotSentError(f"{kind.name}: {type(error).__name__}: {error}") from error
        # Once the first byte is out the core may read the lent rows, even if this task is cancelled before the rest is
        # sent. Rows given to the next request by then would reach the core as those of both.
        await self._socket.send([kind.value, *frames], loan.hand_over if loan is not None else None)

    async def _unless_dead(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Await an operation of a socket; it fails when the core dies instead of waiting without end."""
        self._check_alive()
        future = asyncio.ensure_future(operation())
        if future.done():
            return future.result()
        self._waits.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # _fail cancelled the operation
                self._check_alive()
            raise
        finally:
            self._waits.discard(future)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(self._ended, status)

    def _ended(self, status: int) -> None:
        if self._dead is not None:
            return
        # An event loop that was busy learns of the end before it has read why.
        last = self._socket.last_message()
        if last is not None and last[0] == ENGINE_CORE_DEAD:
            self._fail(death_of(last))
        else:
            self._fail(EngineDeadError(f"the engine core's process ended with status {status}"))

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        self._calls.fail(self._dead)
        self._socket.fail(self._dead)
        for future in self._waits:
            future.cancel()
