"""Requests with images share the rows that an engine's front reads from encoders, which fail; some of them go away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from tests.engine_core.helpers import VOCAB_SIZE, make_config
from tests.engine_core.media import ROW_BYTES, expected, image, make_media, rows_of
from tests.explorer.world import World
from tests.simulation.core_client import CoreClient
from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.request.errors import TokenloomError
from tokenloom.services.engine.core.core_link import CoreLink
from tokenloom.services.engine.core.row_loads import CONCURRENT, Pauses, RowLoads
from tokenloom.services.engine.records.attempt import Attempt, AttemptKV, AttemptMedia, AttemptTimes, TokenCounts
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.v1.encoder_pb2 import ROW_TYPE_FLOAT32, GetRequest, RowChunk
from tokenloom.v1.types_pb2 import MediaItem

NUM_REQUESTS = 6
STEP_SECONDS = 0.01
_NUM_ROWS = 5
_KEYS = "abc"
_CONFIG = make_config(max_model_len=64, budget=8, max_num_seqs=2, rows_bytes=2 * _NUM_ROWS * ROW_BYTES)


class _Channel:
    """Leads to an encoder whose calls fail at once, end early, or have lost the file."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_closed = False

    def unary_stream(self, *_: object, **__: object) -> Callable[[GetRequest], "_Call"]:
        return lambda request: _Call(self._world, request)

    def unary_unary(self, *_: object, **__: object) -> Callable[[object], Awaitable[None]]:
        async def answer(_: object) -> None:
            """Answer whether the encoder is there, unless it hangs."""
            await self._world.step(2)
            if self._world.random.random() < 0.5:
                await asyncio.Event().wait()

        return answer

    stream_unary = unary_unary

    async def close(self, grace: float | None = None) -> None:
        await self._world.step(2)
        self.is_closed = True


class _Call:
    def __init__(self, world: World, request: GetRequest) -> None:
        self._world = world
        self._request = request
        self._chunks = self._all()

    async def read(self) -> object:
        return await anext(self._chunks, grpc.aio.EOF)

    async def _all(self) -> AsyncIterator[RowChunk]:
        world, item = self._world, self._request.item
        await world.step(4)
        draw = world.random.random()
        if draw > 0.98:
            await asyncio.Event().wait()
        if draw < 0.25:
            raise _error(grpc.StatusCode.UNAVAILABLE)
        if draw < 0.35:
            raise _error(grpc.StatusCode.NOT_FOUND)
        rows = rows_of(RowsKey(item.key, item.num_rows, 1))
        for first in range(self._request.first_row, len(rows), 2):
            part = rows[first : first + 2]
            yield RowChunk(
                first_row=first, num_rows=len(part), width=HIDDEN_SIZE, rows=part.tobytes(), type=ROW_TYPE_FLOAT32
            )
            await asyncio.sleep(world.random.choice((0.0, 0.0, 3 * STEP_SECONDS)))
            if world.random.random() < 0.2:
                return

    def cancel(self) -> None:
        """Do nothing: the generator ends with its reader."""


def _error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), code.name)


class _Front:
    """Fulfils ``StreamAttempts``."""

    is_amid_step = False

    def __init__(self, world: World) -> None:
        self._world = world
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self.errors: dict[str, TokenloomError] = {}
        self.live: dict[int, Attempt] = {}

    @property
    def notify(self) -> Callable[[], None]:
        return lambda: None

    def take_output(self, attempt: Attempt, output: EngineCoreOutput) -> None:
        self._world.check(attempt.slot in self.live, "a request that has ended gets tokens")
        self.tokens[attempt.key] += output.new_token_ids
        if output.finish_reason is not None:
            self._world.check(output.finish_reason is FinishReason.LENGTH, f"a request ended with {output.error!r}")
            self.end(attempt, output.finish_reason)

    def fail(self, slot: int, error: TokenloomError) -> Attempt | None:
        if (attempt := self.live.get(slot)) is not None:
            self.errors[attempt.key] = error
            self.end(attempt, FinishReason.ERROR)
        return attempt

    def end(self, attempt: Attempt, reason: FinishReason) -> None:
        del self.live[attempt.slot]
        attempt.finish_reason = reason
        self.ended[attempt.key].set()


class RowScenario:
    """Requests ask for one to three images, of which there are few and hardly room for two, and may go away."""

    uses_disk = False

    async def run(self, world: World) -> None:
        plan: Any = SimpleNamespace(step_seconds=STEP_SECONDS, copy_seconds=STEP_SECONDS, state_chunk=0, state_bytes=1)
        client = CoreClient(_CONFIG, VOCAB_SIZE, plan, Random(0), ())
        metrics: Any = SimpleNamespace(observe_step=_ignore, observe_output=_ignore, observe_end=_ignore)
        load = LoadTracker(8, 8, world.loop.time)
        link = CoreLink(client, await client.start(), load, metrics, clock=world.loop.time)
        channels: Any = SimpleNamespace(open=lambda *_: _Channel(world))
        row_metrics: Any = SimpleNamespace(loaded=_ignore, failed=_ignore)
        rows = link.rows = RowLoads(link, channels, HIDDEN_SIZE, row_metrics, Pauses(0.0, 0.0))
        front = _Front(world)

        def check() -> None:
            """Check that each load is for requests that live."""
            loads = rows._loads.values()
            world.check(all(load.attempts for load in loads), "a load goes on for no request")
            live = {attempt.key for attempt in front.live.values()}
            world.check(all(load.attempts.keys() <= live for load in loads), "a load goes on for a request that ended")
            world.check({load.task for load in loads} == rows._tasks._tasks.keys(), "a load goes on that is not known")

        world.loop.on_idle = check
        running = [world.begin(link.run(), "core"), world.begin(link.run_aborts(), "aborts")]
        asking = [world.actor(_ask(world, link, front, slot), f"request {slot}") for slot in range(NUM_REQUESTS)]
        await asyncio.wait(asking)
        for _ in range(1000):  # what they have left is on its way
            if not client.core.scheduler.requests and not rows._tasks._tasks:
                break
            await asyncio.sleep(STEP_SECONDS)
        media = client.core.scheduler.media
        assert media is not None
        world.check(not link._live, "a request that has ended is live")
        world.check(not client.core.scheduler.requests, "the core keeps a request that has ended")
        world.check(not media.num_bytes and not media.parked, "rows stay that no request needs")
        world.check(not rows._loads, "a load goes on for no request")
        world.check(rows._room._value == CONCURRENT, "the room of a load is not given back")
        world.check(
            not any(users[0] for _, users in rows._encoders._open.values()), "a channel has a user that is gone"
        )
        await rows.close()
        for task in running:
            task.cancel()
        await world.all_ended()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _ask(world: World, link: CoreLink, front: _Front, slot: int) -> None:
    await world.step(8)
    request, key = _request(world, slot), str(slot)
    items = {
        span.rows_key: MediaItem(key=span.key, num_rows=span.num_rows, levels=1, encoder=f"at {world.random.random()}")
        for span in request.media
    }
    attempt = Attempt(
        slot,
        key,
        request_id=key,
        trace_headers=None,
        request=request,
        tokens=TokenCounts(len(request.prompt_token_ids), 0, 0),
        times=AttemptTimes(link.clock()),
        kv=AttemptKV(b"", awaits_tokens=False),
        media=AttemptMedia(items, "", b""),
    )
    front.live[slot], front.tokens[key], front.ended[key] = attempt, [], asyncio.Event()
    link.open(attempt, front)
    try:
        await link.hand_over(attempt)
        await front.ended[key].wait()
    finally:
        if slot in front.live:
            front.end(attempt, FinishReason.ABORT)
            link.end([attempt])
    if key in front.errors:
        reason = front.errors[key].reason
        world.check(reason == "MEDIA_LOST", f"a request failed with {reason}")
    else:
        world.check(front.tokens[key] == expected(request), "a request got wrong tokens")


def _request(world: World, slot: int) -> EngineCoreRequest:
    shown = [world.random.choice(_KEYS) for _ in range(world.random.randint(1, 3))]
    spans = [image(2 + 8 * place, _NUM_ROWS, key) for place, key in enumerate(shown)]
    return make_media(str(slot), *spans, length=30, max_tokens=3, salt=bytes([world.random.randint(0, 1)]))


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""
