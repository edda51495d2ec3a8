"""Sounds are put at an encoder and pieces of them computed, while processes fail, disks fill and clients go away."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from tests.explorer.world import World
from tokenloom.request import errors
from tokenloom.services.encoder.encoder_servicer import EncoderServicer
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.media_store import MediaStore
from tokenloom.services.encoder.pixel_slots import PixelPart, read_all, write_all
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.encoder.row_maker import MakerMetrics, RowMaker
from tokenloom.services.encoder.sound_files import SoundFile, SoundFiles, SoundLimits
from tokenloom.services.encoder.tower_worker import TowerJob, TowerReady, TowerReply
from tokenloom.v1.encoder_pb2 import GetEncoderInfoResponse, GetRequest, PutHeader, PutRequest, ReleaseFilesRequest
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MediaItem

NUM_CLIENTS = 5
_BATCH = 2
_ROOM = 3000
"""For three of the largest sounds."""
_NO_CONTEXT = cast(Any, None)
_EXPECTED = (errors.ResourceExhausted, errors.NotFound, errors.Internal, errors.PayloadTooLarge)


class _Processes:
    """Reads, prepares and computes, in steps; fails now and then. A row is the length of its file."""

    rate = 16_000
    is_confined = True

    def __init__(self, world: World) -> None:
        self._world = world
        self.maker: RowMaker | None = None
        self.slots: dict[int, int] = {}
        self.num_computing = 0

    async def start(self, slots: tuple[int, ...]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def read(self, source: SoundFile, target: SoundFile) -> None:
        data = read_all(source.descriptor, source.num_bytes, 0)
        for first in range(0, len(data), 50):
            await asyncio.sleep(self._world.random.choice((0.0, 0.0, 0.3)))
            if self._world.random.random() < 0.02:
                raise errors.Internal("3 processes ended")
            target.write(np.zeros(len(data[first : first + 50]), np.float32).tobytes(), first * 4)
        target.num_samples = len(data)

    async def prepare(self, file: SoundFile, item: MediaItem, slot: int) -> list[PixelPart]:
        self._world.check(slot not in self.slots, "two pieces have one slot")
        self.slots[slot] = file.num_samples
        try:
            await self._world.step(3)
            if self._world.random.random() < 0.1:
                raise errors.Internal("3 processes ended")
        except BaseException:
            del self.slots[slot]
            raise
        return []

    async def run(self, request: bytes) -> bytes:
        """Compute a batch."""
        job, maker = msgspec.msgpack.decode(request, type=TowerJob), self.maker
        assert maker is not None
        self._world.check(not self.num_computing, "the tower computes two batches at a time")
        self.num_computing += 1
        try:
            values = [self.slots[each.slot] for each in job.inputs]
            await self._world.step(4)
            self._world.check(
                values == [self.slots[each.slot] for each in job.inputs], "a slot was given away while it was read"
            )
            if self._world.random.random() < 0.1:
                raise errors.Internal("3 processes ended")
            write_all(maker._rows, np.array(values, np.float32).tobytes(), 0)
        finally:
            self.num_computing -= 1
        return msgspec.msgpack.encode(TowerReply([1] * len(values)))


class EncoderScenario:
    """Clients put the same few sounds, ask for pieces of them, and let them go."""

    uses_disk = False

    async def run(self, world: World) -> None:
        ignored: Any = SimpleNamespace(observe=_ignore, inc=_ignore)
        metrics: Any = SimpleNamespace(put_bytes=ignored, rows=ignored)
        processes = _Processes(world)
        settings = EncoderSettings.of(model="any", tower_batch=_BATCH, image_workers=2)
        maker = RowMaker("", settings, MakerMetrics(ignored, ignored), processes, hears=True, clock=world.loop.time)
        maker._towers, processes.maker = cast(Any, processes), maker
        maker._take_tower(msgspec.msgpack.encode(TowerReady(width=1, most=_BATCH)))
        slots, give_back = maker._slots, maker._slots.give_back
        slots.give_back = lambda slot: (processes.slots.pop(slot, None), give_back(slot))[1]  # type: ignore[method-assign]
        files = MediaStore[Any](_ROOM, 600.0, world.loop.time)
        cache = RowCache(1000)
        sounds = SoundFiles(files, processes, SoundLimits(1000, 2, "", 0), ignored)
        info = GetEncoderInfoResponse(media_kinds=[MEDIA_KIND_AUDIO], max_file_bytes=1000)
        servicer = EncoderServicer(files, cache, maker, info, metrics, sounds)
        clients = [world.actor(_use(world, servicer, f"{name}"), f"client {name}") for name in range(NUM_CLIENTS)]
        await asyncio.wait(clients)
        for _ in range(100):  # what nobody waits for any more
            if len(slots._free) == len(slots.descriptors) and not processes.num_computing:
                break
            await asyncio.sleep(0.1)
        world.check(len(slots._free) == len(slots.descriptors), "a slot is not given back")
        world.check(not files._arriving, "room for a sound is not given back")
        world.check(not files.num_pinned_bytes and not files._held, "a request that was released pins a sound")
        world.check(
            files.num_bytes == sum(len(each.data) for each in files._files.values()), "bytes are counted wrongly"
        )
        world.check(not servicer.num_calls and not servicer.num_waiting, "a call that has ended counts")
        world.check(not sounds._turns.num_waiting and not sounds._turns._held, "the turn of a sound is not given back")
        await cache.close()
        await maker.close()
        await world.all_ended()

    async def recover(self, world: World) -> None:
        raise AssertionError("nothing of it is on a disk")


async def _use(world: World, servicer: EncoderServicer, name: str) -> None:
    await world.step(8)
    size, key = 50 * world.random.randint(2, 5), world.random.randint(0, 1)
    tenant = world.random.choice("ab")
    data = bytes(size)

    async def messages() -> AsyncIterator[PutRequest]:
        yield PutRequest(header=PutHeader(kind=MEDIA_KIND_AUDIO, tenant=tenant, request_id=name))
        for first in range(0, size, 100):
            await world.step(2)
            yield PutRequest(data=data[first : first + 100])

    try:
        facts = await servicer.Put(messages(), _NO_CONTEXT)
        world.check(facts.samples == size, "a sound has another length")
        item = MediaItem(key=facts.digest + bytes([key]), kind=MEDIA_KIND_AUDIO, num_rows=1, digest=facts.digest)
        async for chunk in servicer.Get(GetRequest(item=item, tenant=tenant), _NO_CONTEXT):
            rows = np.frombuffer(chunk.rows, np.float32).tolist()
            world.check(rows == [float(size)], "a piece got the rows of another one")
    except _EXPECTED:
        pass
    finally:
        await servicer.ReleaseFiles(ReleaseFilesRequest(tenant=tenant, request_id=name), _NO_CONTEXT)


def _ignore(*_: object, **__: object) -> None:
    """Do nothing."""
