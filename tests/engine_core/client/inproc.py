"""An ``AsyncClient`` whose core runs on a thread of this process: quick to start, and open to a test's own worker."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq
import zmq.asyncio

from tokenloom.engine_core.client.async_core_client import PendingCalls
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.core_calls import CoreCalls
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import (
    EngineConfigError,
    EngineDamagedError,
    EngineDeadError,
    EngineStartError,
    WeightsDamagedError,
)
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_messages import KVCall, KVEvent
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    ArrivedRows,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
)
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.kv_service import KVService, KVThread
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
from tokenloom.engine_core.process.core_io import INPUT_QUEUE_SIZE, InputMessage
from tokenloom.engine_core.wire.frames import Decoder, encode


class AsyncInprocClient:
    """The core on a thread of this process."""

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

        self._core.on_update(wake)
        if self._kv is not None and self._kv.service is not None:
            self._kv_link = _InprocKVLink(self._kv.service)
        return self._core.ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._put(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        await self._put(list(request_ids))

    async def accept_tokens(self, message: AcceptTokens) -> None:
        await self._put(message)

    async def send_rows(self, message: ArrivedRows) -> None:
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
            is_damaged = isinstance(error, WeightsDamagedError)
            self._fail(EngineDamagedError(str(error)) if is_damaged else EngineDeadError("the engine core failed"))
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
                self._core.scheduler.accept_tokens(message)
                return
            case ArrivedRows():
                answer = self._calls.take_rows(message)
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
        if not self._inputs.full():  # a full queue already wakes its reader
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
