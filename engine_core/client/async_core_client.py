"""Clients of an engine core for an event loop: over ZMQ, or with the core on a thread of the same process."""

import asyncio
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import zmq
import zmq.asyncio

from ..config import EngineConfig
from ..control.core_calls import CoreCalls
from ..control.utilities import UtilityCall
from ..core import EngineCore
from ..errors import EngineConfigError, EngineDeadError, EngineStartError
from ..executor.executor import Executor
from ..kv_transfer.core_kv import make_core_kv
from ..kv_transfer.kv_messages import KVCall, KVEvent
from ..kv_transfer.kv_service import KVService
from ..kv_transfer.kv_thread import KVThread
from ..kv_transfer.kv_transport import KVTransport
from ..process.core_io import ENGINE_CORE_DEAD, INPUT_QUEUE_SIZE, InputMessage
from ..process.core_launch import CORE_COMMAND, CoreProcess
from ..wire.array_arena import ArrayArena
from ..wire.messages import AcceptTokens, CoreReady, EngineCoreOutputs, EngineCoreRequest, RequestType
from ..wire.serialization import Decoder, encode
from .async_socket import AsyncSocket
from .pending_calls import PendingCalls

T = TypeVar("T")


class AsyncClient(Protocol):
    """What the engine service's front needs of a core.

    One task reads :meth:`get_output` for ever; utility calls are answered while it does.
    """

    async def start(self) -> CoreReady:
        """Brings the core up. Raises ``EngineStartError``."""

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Hands a request over; a refusal comes as its output. Raises ``EngineDeadError``."""

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests without an output; unknown ones are ignored. Raises ``EngineDeadError``."""

    async def accept_tokens(self, message: AcceptTokens) -> None:
        """Gives a request its tokens that were added ahead of them; ignored for an unknown one. ``EngineDeadError``."""

    async def get_output(self) -> EngineCoreOutputs:
        """What one step produced; waits for it. Raises ``EngineDeadError``."""

    async def call_utility(self, method: str, *args: object) -> object:
        """Calls one of the core's utilities. Raises ``UtilityError`` when it fails, ``EngineDeadError``."""

    async def kv_send(self, call: KVCall) -> None:
        """Says something to the core's KV thread. Raises ``EngineDeadError``. Only with ``KVConfig.transports``."""

    async def kv_receive(self) -> KVEvent:
        """What the KV thread says next; waits for it. One task reads it for ever. Raises ``EngineDeadError``."""

    async def close(self) -> None:
        """Ends the core. Idempotent."""


class AsyncMPClient:
    """The core in a process of its own: a busy loop in this one would delay every stream."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND, *, grace: float = 5.0) -> None:
        """``grace``: seconds that :meth:`close` leaves the core to finish its step before it is killed."""
        self._config = config
        self._grace = grace
        self._process = CoreProcess(command)
        self._arena = ArrayArena(config.parallel.array_arena_bytes)
        self._context = zmq.asyncio.Context()
        # Sockets keep ZMQ's own bound of 1000 messages: beyond, a send waits.
        self._input = self._bind(zmq.PUSH, self._process.input_address)
        self._output = self._bind(zmq.PULL, self._process.output_address)
        self._kv = self._context.socket(zmq.PAIR)
        if config.kv.transports:
            self._kv.bind(self._process.kv_address)
        self._decoder = Decoder(EngineCoreOutputs)
        self._kv_events: Decoder[KVEvent] = Decoder(KVEvent)
        self._calls = PendingCalls()
        self._dead: EngineDeadError | None = None
        self._waits: set[asyncio.Future[Any]] = set()  # for the KV socket, which a dead core would leave for ever
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the core's process."""
        return self._process.pid

    async def start(self) -> CoreReady:
        try:
            ready = await asyncio.to_thread(self._process.start, self._config, self._arena.address)
        except BaseException:
            self._process.kill()  # also ends the wait in the thread when it was us who were cancelled
            raise
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="core-watch", daemon=True).start()
        return ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._send(RequestType.ADD, request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        await self._send(RequestType.ABORT, list(request_ids))

    async def accept_tokens(self, message: AcceptTokens) -> None:
        await self._send(RequestType.ACCEPT, message)

    async def get_output(self) -> EngineCoreOutputs:
        while True:
            frames = await self._output.receive()
            if frames[0] == ENGINE_CORE_DEAD:
                self._fail(EngineDeadError("the engine core failed; its log says why"))
                assert self._dead is not None
                raise self._dead
            outputs = self._decoder.decode(frames)
            if not self._calls.take(outputs):
                return outputs

    async def call_utility(self, method: str, *args: object) -> object:
        return await self._calls.make(method, args, functools.partial(self._send, RequestType.UTILITY))

    async def kv_send(self, call: KVCall) -> None:
        assert self._config.kv.transports, "this core moves no KV"
        frames = encode(call)
        await self._unless_dead(lambda: self._kv.send_multipart(frames))

    async def kv_receive(self) -> KVEvent:
        return self._kv_events.decode(await self._unless_dead(self._kv.recv_multipart))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._process.stop, self._grace)
        self._fail(EngineDeadError("the client was closed"))
        self._context.destroy(linger=0)
        self._arena.close()

    async def _send(self, kind: RequestType, message: object) -> None:
        with self._arena.lend() as loan:
            frames = [kind.value, *encode(message, loan)]
            is_small = len(frames) == 2  # no arrays: copying is cheaper
            await self._input.send(frames, copy=is_small)

    def _bind(self, kind: int, address: str) -> AsyncSocket:
        context: Any = self._context  # pyzmq's types know no plain socket of such a context
        socket: zmq.Socket[bytes] = context.socket(kind, socket_class=zmq.Socket)
        socket.bind(address)
        return AsyncSocket(socket)

    async def _unless_dead(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Awaits a ZMQ operation, which the death of the core would leave waiting for ever."""
        self._check_alive()
        future = asyncio.ensure_future(operation())
        if future.done():
            return future.result()
        self._waits.add(future)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # then it was the operation that was cancelled, by _fail
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
            loop.call_soon_threadsafe(
                self._fail, EngineDeadError(f"the engine core's process ended with status {status}")
            )

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        self._calls.fail(self._dead)
        self._input.fail(self._dead)
        self._output.fail(self._dead)
        for future in self._waits:
            future.cancel()


class AsyncInprocClient:
    """The core on a thread of this process: for tests and for engines too small to deserve a process."""

    def __init__(self, config: EngineConfig, executor: Executor, transports: Sequence[KVTransport] = ()) -> None:
        """``transports``: ways for its KV to move, where ``config.kv`` names any."""
        self._config = config
        self._executor = executor
        self._kv = make_core_kv(config, transports)
        self._kv_link: _InprocKVLink | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="core")
        # As many as a core's process takes in during one step.
        self._inputs: asyncio.Queue[InputMessage] = asyncio.Queue(INPUT_QUEUE_SIZE)
        self._answers: deque[EngineCoreOutputs] = deque()  # at most one for each input taken in since the last step
        self._pending = PendingCalls()
        self._core: EngineCore | None = None
        self._calls: CoreCalls | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None

    async def start(self) -> CoreReady:
        loop = self._loop = asyncio.get_running_loop()
        try:
            self._core = await loop.run_in_executor(self._thread, EngineCore, self._config, self._executor, self._kv)
        except ValueError as error:
            raise EngineConfigError(str(error)) from error
        except Exception as error:
            raise EngineStartError(f"the engine core did not start: {error}") from error
        self._calls = CoreCalls(self._core)

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake)

        self._core.on_news(wake)
        if self._kv is not None and self._kv.service is not None:
            self._kv_link = _InprocKVLink(self._kv.service)
        return self._core.ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._put(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        await self._put(list(request_ids))

    async def accept_tokens(self, message: AcceptTokens) -> None:
        await self._put(message)

    async def get_output(self) -> EngineCoreOutputs:
        assert self._core is not None
        assert self._calls is not None
        while True:
            if self._dead is not None:
                raise self._dead
            if self._answers:
                return self._answers.popleft()
            if not self._core.has_work():
                self._process(await self._inputs.get())
            while not self._inputs.empty():
                self._process(self._inputs.get_nowait())
            if self._core.has_work() and not self._answers:
                return await self._step(self._calls)

    async def call_utility(self, method: str, *args: object) -> object:
        return await self._pending.make(method, args, self._put)

    async def kv_send(self, call: KVCall) -> None:
        if self._dead is not None:
            raise self._dead
        assert self._kv_link is not None, "this core moves no KV"
        await self._kv_link.send(call)

    async def kv_receive(self) -> KVEvent:
        if self._dead is not None:
            raise self._dead
        assert self._kv_link is not None, "this core moves no KV"
        if (event := await self._kv_link.receive()) is None:
            raise self._dead or EngineDeadError("the client was closed")
        return event

    async def close(self) -> None:
        self._fail(EngineDeadError("the client was closed"))
        await asyncio.to_thread(self._thread.shutdown)
        if self._core is not None:
            await asyncio.to_thread(self._core.shutdown)
        elif self._kv is not None:
            await asyncio.to_thread(self._kv.connector.shutdown)
        if self._kv_link is not None:
            await self._kv_link.close()
            self._kv_link = None

    async def _put(self, message: InputMessage) -> None:
        if self._dead is not None:
            raise self._dead
        await self._inputs.put(message)

    async def _step(self, calls: CoreCalls) -> EngineCoreOutputs:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, calls.step)
        except Exception as error:
            self._fail(EngineDeadError("the engine core failed; its log says why"))
            assert self._dead is not None
            raise self._dead from error

    def _process(self, message: InputMessage) -> None:
        assert self._core is not None
        assert self._calls is not None
        match message:
            case None:
                return  # woken to see that the client is dead
            case EngineCoreRequest():
                answer = self._calls.add(message)
            case AcceptTokens():
                self._core.accept_tokens(message)
                return
            case UtilityCall():
                self._calls.call(message, self._answer)
                return
            case _:
                answer = self._calls.abort(message)
        if answer is not None:
            self._answers.append(answer)

    def _answer(self, outputs: EngineCoreOutputs) -> None:
        """Of a utility call; from the thread that steps when it took steps."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._pending.take, outputs)

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        self._pending.fail(self._dead)
        self._wake()

    def _wake(self) -> None:
        if not self._inputs.full():  # else nobody waits for it
            self._inputs.put_nowait(None)


class _InprocKVLink:
    """The KV thread in this process."""

    def __init__(self, service: KVService) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.bind("inproc://kv")
        self._events: Decoder[KVEvent] = Decoder(KVEvent)
        self._receiving: asyncio.Future[list[bytes]] | None = None
        self._thread = KVThread(zmq.Context.shadow(self._context.underlying), "inproc://kv", service)
        self._thread.start()

    async def send(self, call: KVCall) -> None:
        await self._socket.send_multipart(encode(call))

    async def receive(self) -> KVEvent | None:
        """None: closed."""
        self._receiving = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            return self._events.decode(await self._receiving)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # then it was :meth:`close`
                return None
            raise
        finally:
            self._receiving = None

    async def close(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
        await asyncio.to_thread(self._thread.stop)
        self._context.destroy(linger=0)
