"""An engine core in the event loop of its front: a step takes its time on the virtual clock, and no thread is used."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from random import Random
from typing import Any

from tokenloom.engine_core.client.async_core_client import PendingCalls
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.core_calls import CoreCalls
from tokenloom.engine_core.data.config import EngineConfig, KVConfig
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_messages import KVCall, KVEvent
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    ArrivedRows,
    EngineCoreOutputs,
    EngineCoreRequest,
    UtilityCall,
)
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_transfer.core_kv import make_core_kv
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_service import KVService
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport

from .compilers import Compilers
from .plan import Plan


class CoreClient:
    """Implements ``AsyncClient`` with the hash worker.

    Attributes:
        core: The engine core, once started.
        compilers: Compile its grammars, once started; missing if it has none.
        is_hung: While true, the step that runs does not end.
    """

    core: EngineCore
    compilers: Compilers

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        plan: Plan,
        random: Random,
        transports: Sequence[KVTransport],
    ) -> None:
        self.is_hung = False
        self._config = config
        self._vocab_size = vocab_size
        self._plan = plan
        self._random = random
        self._transports = transports
        self._inputs: deque[Any] = deque()
        self._wake = asyncio.Event()
        self._answers: deque[EngineCoreOutputs] = deque()
        self._pending = PendingCalls()
        self._kv: _KVThread | None = None
        self._dead: EngineDeadError | None = None

    async def start(self) -> CoreReady:
        loop = asyncio.get_running_loop()
        kv = make_core_kv(self._config, self._transports, self._make_kv_service)
        worker = HashWorker(
            self._config,
            vocab_size=self._vocab_size,
            max_model_len=self._config.max_model_len or 128,
            state_chunk=self._plan.state_chunk,
            state_bytes=self._plan.state_bytes,
        )
        self.core = EngineCore(self._config, UniProcExecutor(worker), kv, lambda: round(loop.time() * 1e9))
        self._calls = CoreCalls(self.core)
        if self.core._grammars is not None:
            self.compilers = Compilers(self.core._grammars)
        self.core.on_update(self._wake.set)
        if kv is not None and kv.service is not None:
            self._kv = _KVThread(kv.service)
        return self.core.ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._put(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._put(list(request_ids))

    async def accept_tokens(self, message: AcceptTokens) -> None:
        self._put(message)

    async def send_rows(self, message: ArrivedRows) -> None:
        self._put(message)

    async def get_output(self) -> EngineCoreOutputs:
        while True:
            if self._dead is not None:
                raise self._dead
            if self._answers:
                return self._answers.popleft()
            while self._inputs:
                self._process(self._inputs.popleft())
            if self._answers:
                continue
            if self.core.has_work():
                await self._compute()
                return self._calls.step()
            self._wake.clear()
            await self._wake.wait()

    async def call_utility(self, method: str, *args: object) -> object:
        async def send(call: UtilityCall) -> None:
            self._put(call)

        return await self._pending.make(method, args, send)

    async def kv_send(self, call: KVCall) -> None:
        if self._dead is not None:
            raise self._dead
        assert self._kv is not None, "this core moves no KV"
        self._kv.receive(call)

    async def kv_receive(self) -> KVEvent:
        if self._dead is not None:
            raise self._dead
        assert self._kv is not None, "this core moves no KV"
        if (event := await self._kv.events.get()) is None:
            raise self._dead or EngineDeadError("the client was closed")
        return event

    async def close(self) -> None:
        self.fail("the client was closed")

    def fail(self, reason: str) -> None:
        """End the core as a crash of its process would."""
        self._dead = self._dead or EngineDeadError(reason)
        self._pending.fail(self._dead)
        self._wake.set()
        if self._kv is not None:
            self._kv.events.put_nowait(None)

    async def _compute(self) -> None:
        await asyncio.sleep(self._plan.step_seconds)
        while self.is_hung and self._dead is None:  # noqa: ASYNC110
            await asyncio.sleep(self._plan.step_seconds)
        if self._dead is not None:
            raise self._dead

    def _put(self, message: Any) -> None:
        if self._dead is not None:
            raise self._dead
        self._inputs.append(message)
        self._wake.set()

    def _process(self, message: Any) -> None:
        match message:
            case EngineCoreRequest():
                answer = self._calls.add(message)
            case AcceptTokens():
                self.core.scheduler.accept_tokens(message)
                return
            case ArrivedRows():
                answer = self._calls.take_rows(message)
            case UtilityCall():
                self._calls.call(message, self._pending.take)
                return
            case _:
                answer = self._calls.abort(message)
        if answer is not None:
            self._answers.append(answer)

    def _make_kv_service(
        self, config: KVConfig, transports: Sequence[KVTransport], failpoints: Failpoints
    ) -> KVService:
        loop, random = asyncio.get_running_loop(), self._random
        return KVService(
            config,
            transports,
            failpoints,
            executor=_TimedExecutor(loop, self._plan.copy_seconds),
            clock=loop.time,
            new_id=lambda: random.randbytes(16),
        )


class _KVThread:
    """Does the work of the core's KV thread whenever there is some."""

    def __init__(self, service: KVService) -> None:
        self.events: asyncio.Queue[KVEvent | None] = asyncio.Queue()
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._turn_at: asyncio.TimerHandle | None = None
        self._is_due = False
        service.on_wake = self._wake

    def receive(self, call: KVCall) -> None:
        """Pass a call of the front to the service."""
        self._service.receive(call)
        self._wake()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due = False
        if self._turn_at is not None:
            self._turn_at.cancel()
            self._turn_at = None
        seconds = self._service.run()
        for event in self._service.take_events():
            self.events.put_nowait(event)
        if seconds is not None:
            self._turn_at = self._loop.call_later(seconds, self._turn)


class _TimedExecutor(Executor):
    """Does work after the time that a copy takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        self._loop.call_later(self._seconds, fn, *args)
        return Future()
