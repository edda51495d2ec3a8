"""Fronts without cores: what a front tells its core is noted, and the test says what the core answers."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.services.engine.peer import VOCAB_SIZE, make_settings
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_messages import (
    KVAcquire,
    KVAnswer,
    KVCall,
    KVEvent,
    KVProgress,
    KVRelease,
    KVRenew,
    KVTarget,
)
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.engine_pb2 import KVSource

BLOCK_SIZE = 4
LAYOUT = "HND/f32/2x1x4"
LEASE = bytes(range(16))
T = TypeVar("T")


class FakeCore:
    """Fulfils ``AsyncClient``. ``answers`` says what the KV thread answers to a call: nothing, if it has no entry."""

    def __init__(self, layout: str = LAYOUT) -> None:
        self.layout = layout
        self.answers: dict[type, Callable[[Any], KVAnswer | None]] = {}
        self._noted: dict[type, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._events: asyncio.Queue[KVEvent] = asyncio.Queue()
        self._taking = False
        self._num_added = 0

    async def noted(self, kind: type[T]) -> T:
        """The next message of this kind that the front sent."""
        async with asyncio.timeout(30):
            message: T = await self._noted[kind].get()
            return message

    def has_noted(self, kind: type) -> bool:
        return not self._noted[kind].empty()

    def put(self, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None) -> None:
        """A step's outputs."""
        self._outputs.put_nowait(
            EngineCoreOutputs(1, list(outputs), scheduler_stats=stats, num_requests_added=self._num_added)
        )

    def finish(self, request: EngineCoreRequest, token_ids: list[int], reason: FinishReason) -> None:
        """Ends a request with these tokens."""
        index = len(request.accepted_token_ids)
        self.put(EngineCoreOutput(request.request_id, token_ids, index, reason))

    def say(self, event: KVEvent) -> None:
        """From the KV thread."""
        self._events.put_nowait(event)

    async def until_taken(self) -> None:
        """The front has dealt with all that was put."""
        await self._outputs.join()

    async def start(self) -> CoreReady:
        return CoreReady(600, 500, VOCAB_SIZE, BLOCK_SIZE, self.layout, "fake")

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._num_added += 1
        self._noted[EngineCoreRequest].put_nowait(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._noted[str].put_nowait(request_id)

    async def accept_tokens(self, message: AcceptTokens) -> None:
        self._noted[AcceptTokens].put_nowait(message)

    async def get_output(self) -> EngineCoreOutputs:
        if self._taking:  # whoever asks again has dealt with the last
            self._outputs.task_done()
        self._taking = True
        return await self._outputs.get()

    async def call_utility(self, method: str, *args: object) -> object:
        assert method in ("check_health", "fall_backs", "lend_request", "requests_to_lend"), method
        return "it waits to run" if method == "lend_request" else None

    async def kv_send(self, call: KVCall) -> None:
        self._noted[type(call)].put_nowait(call)
        if (make := self.answers.get(type(call))) is not None and (answer := make(call)) is not None:
            self.say(answer)

    async def kv_receive(self) -> KVEvent:
        return await self._events.get()

    async def close(self) -> None:
        pass


def owning_core(num_tokens: int, ready: int | None = None) -> FakeCore:
    """One that holds a good lease on so many tokens; ``ready`` of them are computed, all by default."""
    core = FakeCore()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    target = KVTarget(b"reading", "shm", b"there", list(range(num_blocks)), [9] * num_blocks, num_tokens)
    tokens_ready = num_tokens if ready is None else ready

    def progress(call: KVProgress) -> KVAnswer | None:
        if call.tokens_seen >= tokens_ready:
            return None
        return KVAnswer(call.call_id, tokens_ready=tokens_ready, num_tokens=num_tokens)

    core.answers = {
        KVAcquire: lambda call: KVAnswer(call.call_id, target=target, ttl_seconds=30.0),
        KVProgress: progress,
        KVRenew: lambda call: KVAnswer(call.call_id, ttl_seconds=30.0),
        KVRelease: lambda call: KVAnswer(call.call_id, valid=True, checksums=[5] * num_blocks),
    }
    return core


@asynccontextmanager
async def running_front(directory: Path, name: str, core: FakeCore, **changes: Any) -> AsyncIterator[Host]:
    """An engine over a fake core, in the coordinator's registry."""
    values = {
        "instance_id": name,
        "listen": f"unix:{directory}/{name}",
        "kv_listen": f"unix:{directory}/{name}-kv",
        "kv_transports": ["shm", "socket"],
        "coordinator": f"unix:{directory}/coordinator",
        "drain_timeout": 0.2,
    }
    settings = make_settings(directory, **{**values, **changes})
    async with running(EngineService(settings, core), settings) as host:
        yield host


@asynccontextmanager
async def running_coordinator(directory: Path) -> AsyncIterator[None]:
    settings = CoordinatorSettings.of(listen=f"unix:{directory}/coordinator", metrics_listen="", settle_seconds=0.0)
    async with running(CoordinatorService(settings), settings):
        yield


def source_at(owner: Host, num_tokens: int) -> KVSource:
    """The lease of :func:`owning_core`."""
    name = owner.settings.instance_id
    return KVSource(engine_id=name, engine_epoch=owner.epoch, lease_id=LEASE, num_tokens=num_tokens)
