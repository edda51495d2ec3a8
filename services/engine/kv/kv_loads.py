"""Brings attempts to the core whose prompt another engine has computed.

A lease is acquired before the core gets the request, kept while the core copies the blocks (the steps of a pull stand
in ``engine_core/kv_transfer/pull_connector.py``), and released afterwards. A failure on the way costs a local
recompute, never a wrong token.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from tokenloom.engine_core.data.embedding_rows import content_salt
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.kv_messages import (
    REQUEST_ENDED,
    KVAcquire,
    KVAnswer,
    KVCall,
    KVEvent,
    KVOwnersLeft,
    KVRelease,
    KVRemoteProgress,
    KVVerdict,
    KVVerify,
)
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import TokenloomError, Unavailable
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.tasks import Tasks, first_of
from tokenloom.v1 import engine_pb2, kv_transfer_pb2, types_pb2

from ..core.core_link import CoreLink
from ..records.attempt import Attempt
from .kv_peers import EngineRegistry, KVChannels, KVPaths, Owner, Reading, ReleaseVerdict, Stub


class KVChannel(Protocol):
    """Describes the part of a core's client that reaches its KV thread."""

    async def kv_send(self, call: KVCall) -> None:
        """Send a message to the KV thread. Raises ``EngineDeadError``."""

    async def kv_receive(self) -> KVEvent:
        """Wait for the next message and return it. Raises ``EngineDeadError``."""


class KVLink:
    """Matches answers to their calls. Calls are answered only while :meth:`run` runs."""

    def __init__(self, channel: KVChannel) -> None:
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[KVAnswer]] = {}  # as many as there are callers that wait
        self._dead = False

    async def run(self, on_verify: Callable[[KVVerify], None]) -> None:
        """Resolve calls with their answers and pass each ``KVVerify`` to ``on_verify``, until the core has died."""
        try:
            while True:
                match await self._channel.kv_receive():
                    case KVAnswer() as answer:
                        if (future := self._waiting.get(answer.call_id)) is not None and not future.done():
                            future.set_result(answer)
                    case KVVerify() as verify:
                        on_verify(verify)
        except EngineDeadError:
            pass  # CoreLink.run raises the same error and ends the service
        finally:
            self._dead = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the engine failed"))

    async def send(self, message: KVRemoteProgress | KVVerdict | KVOwnersLeft) -> None:
        """Send news about the loads of this engine. A dead core does not get it, but its loads ended with it."""
        with contextlib.suppress(EngineDeadError):
            await self._channel.kv_send(message)

    async def call(self, make: Callable[[int], KVCall]) -> KVAnswer:
        """Send the call that ``make`` returns for a call id. Raises ``Unavailable`` if the core is dead."""
        if self._dead:
            raise Unavailable("the engine failed")
        number = next(self._ids)
        future: asyncio.Future[KVAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._channel.kv_send(make(number))
            return await future
        except EngineDeadError:
            raise Unavailable("the engine failed") from None
        finally:
            del self._waiting[number]


log = logging.getLogger(__name__)

LATE_SECONDS = 2.0
"""After so long an owner that did not answer is asked again to end a lease."""
_LATE_TRIES = 5
_UNANSWERED = ("owner_lost", "timeout")
"""Failures of calls that the owner may have received all the same."""
_UNDONE = (FinishReason.ABORT, FinishReason.ERROR)
RECOVERED_SECONDS = 60.0
"""After so long without a failure, blocks that are read show that nothing is computed again any more."""


@dataclass(frozen=True)
class ReaderConfig:
    """Describes this engine as a reader of KV.

    Attributes:
        host: As in ``EngineIdentity``.
        kv_layout: As in ``Fingerprint``.
        block_size: Tokens per block.
        num_kv_groups: Blocks that hold the KV of one block of tokens.
        has_states: Whether layers keep a state, whose slot a lease names behind its blocks.
        transports: Names of transports, best first.
        must_load: Whether a request fails if its KV cannot be loaded; otherwise its prompt is computed here.
        fingerprint: What the engine serves; its weights change.
        incarnation: This engine, as the owner in a ``KVSource``.
    """

    host: str
    kv_layout: str
    block_size: int
    transports: Sequence[str]
    must_load: bool = False
    num_kv_groups: int = 1
    has_states: bool = False
    fingerprint: types_pb2.Fingerprint = field(default_factory=types_pb2.Fingerprint)
    incarnation: tuple[str, int] = ("", 0)


class _Load:
    """Tracks one attempt's load from the acquired lease to the verdict."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        """Set when the core asks for the verdict, or the attempt has ended."""
        self.verify: KVVerify | None = None


class KVLoads:
    """Owns one task for each attempt that loads KV: bounded by the live attempts, and by those of the last two minutes
    whose owner did not answer."""

    def __init__(
        self,
        config: ReaderConfig,
        core: CoreLink,
        link: KVLink,
        registry: EngineRegistry,
        channels: Channels,
        fall_backs: FallBacks,
    ) -> None:
        """``fall_backs``: where it is noted that prompts are computed whose KV could not be read."""
        self._config = config
        self._core = core
        self._link = link
        self._registry = registry
        self._fall_backs = fall_backs
        self._failed_at = 0.0
        self._channels = KVChannels(registry, channels, lambda owners: link.send(KVOwnersLeft(owners)))
        self._paths = KVPaths(config.transports, config.host)
        self._loads: dict[str, _Load] = {}  # by the attempt's key
        self._tasks = Tasks(_log_bug)

    def begin(self, attempt: Attempt, source: engine_pb2.KVSource) -> None:
        """Bring an open attempt to the core, with its KV if it can be acquired."""
        self._tasks.spawn(self._run(attempt, source), name=f"kv-load-{attempt.key}")

    def on_verify(self, verify: KVVerify) -> None:
        """Note that the core has copied the blocks, or given up."""
        if (load := self._loads.get(verify.request_id)) is not None:  # otherwise it has ended, which the core knows
            load.verify = verify
            load.over.set()

    async def run(self) -> NoReturn:
        """Close what belongs to engines that have left, without end."""
        await self._channels.run()

    async def close(self) -> None:
        """End all loads. Leases that are still held expire on their own."""
        await self._tasks.close()
        await self._channels.close()

    async def _run(self, attempt: Attempt, source: engine_pb2.KVSource) -> None:
        try:
            if (source.engine_id, source.engine_epoch) == self._config.incarnation:
                await self._end_own(attempt, source)
                if attempt.request is not None:
                    await self._hand_over(attempt, attempt.request)
                return
            async with AsyncExitStack() as stack:
                acquire: Callable[[], Awaitable[Reading]] | None = None
                try:
                    owner = await self._registry.find(source.engine_id, source.engine_epoch)
                    stub = await stack.enter_async_context(self._channels.stub(owner))
                    acquire = self._acquirer(stub, owner, attempt, source)
                    began = self._core.clock()
                    reading = await acquire()
                    attempt.kv.wait_ns += round((self._core.clock() - began) * 1e9)
                except KVTransferError as failure:
                    await self._do_without(attempt, failure)
                    if acquire is not None and failure.reason in _UNANSWERED:
                        await self._release_late(owner, acquire, attempt)
                else:
                    await self._read(attempt, owner, reading)
        except Exception as error:  # the edge: a bug in one load must not end the engine
            self._core.fail(attempt, of_exception(error))

    def _acquirer(
        self, stub: Stub, owner: Owner, attempt: Attempt, source: engine_pb2.KVSource
    ) -> Callable[[], Awaitable[Reading]]:
        """Return what acquires the lease of a source. Raises ``KVTransferError`` if that is of no use."""
        request = attempt.request
        if request is None:
            raise KVTransferError("not_found", "the attempt has ended")
        if not (transports := self._paths.to(owner)):
            raise KVTransferError("transport", f"no transport of this engine reaches engine {owner.engine_id!r}")
        return partial(
            Reading.acquire,
            stub,
            kv_transfer_pb2.AcquireRequest(
                lease_id=source.lease_id,
                engine_epoch=source.engine_epoch,
                kv_layout=self._config.kv_layout,
                prompt_digest=_digest(request, source),
                transports=transports,
                weights=self._config.fingerprint.weights,
            ),
            num_tokens=source.num_tokens,
            block_size=self._config.block_size,
            num_kv_groups=self._config.num_kv_groups,
            has_states=self._config.has_states,
            owner=owner.incarnation,
        )

    async def _release_late(
        self, owner: Owner, acquire: Callable[[], Awaitable[Reading]], attempt: Attempt | None = None
    ) -> None:
        """End a lease whose owner did not answer once it does. It may last for minutes, and no engine reads its blocks.

        Args:
            acquire: Returns the lease, which this engine holds or may hold. Raises as :meth:`Reading.acquire`.
            attempt: That for which it acquires the lease anew; None if it does not.
        """
        for _ in range(_LATE_TRIES):
            await asyncio.sleep(LATE_SECONDS)
            # Another engine may read the blocks of an attempt that was lost or refused here: a lease that is acquired
            # anew is taken from it.
            if not self._registry.has(owner) or (attempt is not None and attempt.finish_reason in _UNDONE):
                return
            try:
                await (await acquire()).release()
                return
            except KVTransferError as failure:
                if failure.reason not in _UNANSWERED:
                    return

    async def _end_own(self, attempt: Attempt, source: engine_pb2.KVSource) -> None:
        """End a lease of this engine on KV from which a request goes on here: its blocks are in the prefix cache."""
        if attempt.request is None:
            return
        digest, config = _digest(attempt.request, source), self._config
        acquired = await self._link.call(
            lambda call_id: KVAcquire(call_id, source.lease_id, config.kv_layout, digest, [], is_own=True)
        )
        if (target := acquired.target) is not None:  # None: it has ended, or is of another prompt
            await self._link.call(lambda call_id: KVRelease(call_id, target.acquisition_id, target.generations))

    async def _do_without(self, attempt: Attempt, failure: KVTransferError) -> None:
        if attempt.request is None:
            return  # the attempt has ended
        log.debug("request %s: KV could not be acquired (%s)", attempt.request_id, failure)
        if failure.reason != REQUEST_ENDED:
            self._note_failure(str(failure))
            self._core.metrics.kv.observe_recompute(failure.reason)
        if self._config.must_load and failure.reason != REQUEST_ENDED:
            self._core.fail(attempt, Unavailable("the prompt's KV could not be transferred; retry the request"))
        else:
            await self._hand_over(attempt, attempt.request)

    async def _read(self, attempt: Attempt, owner: Owner, reading: Reading) -> None:
        """Keep an acquired lease until the core has the blocks, then release it and send the verdict."""
        load = _Load()
        lost = ""
        if (request := attempt.request) is not None:
            request.remote_kv = reading.target
            self._loads[attempt.key] = load
            attempt.kv.on_end = load.over.set
            try:
                is_complete = not request.awaits_tokens  # a complete prefill has produced its first token
                await self._hand_over(attempt, request)
                lost = await self._hold(attempt.key, load, reading, is_complete=is_complete)
            finally:
                del self._loads[attempt.key]
        # Containers of one host may not share memory although their host names are equal, so a path is judged by what
        # it did.
        if load.verify is not None and load.verify.failure == "transport":
            self._paths.note_failure(owner, reading.target.transport)
        if lost:
            verdict = ReleaseVerdict(valid=False, reason=lost)
        else:
            # The blocks count only after this answer: the owner compares their generations, so blocks that it had to
            # take back and reuse during the copy are computed here instead of giving wrong tokens.
            verdict = await _release(reading)
        if not lost and (load.verify is None or not load.verify.copied):  # the core does not wait for a verdict
            self._note_failure(load.verify.failure if load.verify is not None else "")
        else:
            await self._tell(attempt.key, verdict)
        if verdict.reason in _UNANSWERED:
            await self._release_late(owner, reading.itself)

    async def _tell(self, key: str, verdict: ReleaseVerdict) -> None:
        """Send the core the verdict that it waits for."""
        if verdict.valid:
            self._note_success()
        else:
            self._note_failure(verdict.reason)
        await self._link.send(KVVerdict(key, verdict.valid, reason=verdict.reason, checksums=list(verdict.checksums)))

    def _note_failure(self, reason: str) -> None:
        """Note that a prompt is computed here. ``reason``: empty or ``REQUEST_ENDED`` if it is not, because the request
        has ended."""
        if reason not in ("", REQUEST_ENDED) and not self._config.must_load:
            self._failed_at = asyncio.get_running_loop().time()
            self._fall_backs.begin("kv_recomputed", reason)

    def _note_success(self) -> None:
        # While some reads fail and some do not, the sign would begin and end with each request, with a warning and a
        # write of the state file each time.
        if asyncio.get_running_loop().time() - self._failed_at > RECOVERED_SECONDS:
            self._fall_backs.end("kv_recomputed")

    async def _hand_over(self, attempt: Attempt, request: EngineCoreRequest) -> None:
        assert attempt.request is request
        try:
            await self._core.hand_over(attempt)
        except TokenloomError as error:
            self._core.fail(attempt, error)

    async def _hold(self, key: str, load: _Load, reading: Reading, *, is_complete: bool) -> str:
        """Renew the lease and pass on the progress of an incomplete prefill, until the load is over. Returns the reason
        if the lease ended early, otherwise an empty text."""
        waits: list[Coroutine[Any, Any, object]] = [load.over.wait(), reading.keep()]
        if not is_complete:
            waits.append(self._follow(key, load, reading))
        try:
            await first_of(*waits)
        except KVTransferError as failure:
            level = logging.DEBUG if failure.reason == REQUEST_ENDED else logging.WARNING
            log.log(level, "a lease ended early: %s", failure)
            return failure.reason
        return ""

    async def _follow(self, key: str, load: _Load, reading: Reading) -> None:
        async for tokens_ready in reading.progress():
            await self._link.send(KVRemoteProgress(key, tokens_ready))
        await load.over.wait()


def _digest(request: EngineCoreRequest, source: engine_pb2.KVSource) -> bytes:
    """Return what binds a lease to the tokens of a request that its KV covers, and to its salt."""
    num_bound = source.bound_tokens or source.num_tokens
    token_ids = [*request.listed_prompt(), *request.accepted_token_ids][:num_bound]
    return prompt_digest(token_ids, content_salt(request.cache_salt, request.prompt_embeds, request.media))


async def _release(reading: Reading) -> ReleaseVerdict:
    try:
        return await reading.release()
    except KVTransferError as failure:
        return ReleaseVerdict(valid=False, reason=failure.reason)


def _log_bug(error: BaseException) -> None:
    log.error("loading KV failed because of a bug", exc_info=error)
