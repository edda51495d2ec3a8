"""The events of prefix caches as vLLM's engines publish them over ZeroMQ: their form, and a reader of them.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0 on), and a batch in MessagePack. At the
replay address, a sequence number is answered with all batches from there on, then with the number -1.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenloom.request.errors import InvalidArgument, Unavailable

log = logging.getLogger(__name__)

NUMBER_BYTES: Final = 8
END: Final = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Ends the answer to a replay."""
REPLAY_SECONDS: Final = 5.0
"""How long the next message of a replay may take."""
IDLE_SECONDS: Final = 5.0
"""After so long without a message, it is asked whether one was missed: a subscription takes effect late, and the next
message, which would show the gap, may be far."""
MAX_MESSAGE_BYTES: Final = 64 << 20
"""Of a publisher; a larger message ends the connection."""
BlockHash = int | bytes


class PublishedEvent(msgspec.Struct, omit_defaults=True, tag_field="type", gc=False):
    """What happened in a prefix cache."""


class StoredBlocks(PublishedEvent, tag="BlockStored", kw_only=True):
    """Lists blocks that can be hit from now on, each of which follows the one before it in a prompt."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Of the block before the first; None if that one begins a prompt."""
    token_ids: list[int]
    """[len(block_hashes) * block_size]; empty if they are not published."""
    block_size: int
    lora_id: int | None
    medium: str | None
    """The tier: GPU, CPU, STORAGE."""
    lora_name: str | None
    group_idx: int | None = None


class RemovedBlocks(PublishedEvent, tag="BlockRemoved", kw_only=True):
    """Lists blocks that can no longer be hit."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class ClearedBlocks(PublishedEvent, tag="AllBlocksCleared", kw_only=True):
    """Says that no block can be hit any more."""


Published = StoredBlocks | RemovedBlocks | ClearedBlocks


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one step."""

    ts: float
    """Seconds since 1970."""
    events: list[Published]
    data_parallel_rank: int | None = None


def short_hash(block_hash: bytes) -> int:
    """Return the 64 bits by which vLLM publishes a hash, unless it is told otherwise."""
    return int.from_bytes(block_hash[-8:], "big")


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_raw = msgspec.msgpack.Decoder(_RawBatch)
_ORDER: Final = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def read_batch(payload: bytes) -> EventBatch:
    """Return a batch of any release of vLLM: up to 0.10 an event is an array, from then on a map. Events of other kinds
    are left out. Raises ``InvalidArgument`` for what is no batch."""
    try:
        raw = _raw.decode(payload)
        events = [found for event in raw.events if (found := _event(event)) is not None]
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"the message is no batch of KV events: {error}") from None
    return EventBatch(raw.ts, events, raw.data_parallel_rank)


def _event(event: Any) -> Published | None:
    if isinstance(event, list):
        names = _ORDER.get(event[0]) if event and isinstance(event[0], str) else None
        if names is None:
            return None
        values = dict(zip(names, event[1:], strict=False))
        event = {"type": event[0], **dict.fromkeys(names), **values}
    if not isinstance(event, dict) or event.get("type") not in _ORDER:
        return None
    found: Published = msgspec.convert(dict.fromkeys(_ORDER[event["type"]]) | event, Published)
    return found


@dataclass(frozen=True, slots=True)
class KVEventSource:
    """Where events are published, and how they are read."""

    endpoint: str
    replay_endpoint: str | None = None
    """None: what was missed stays missed."""
    topic: str = ""
    key_file: Path | None = None
    """Our secret CURVE key; None: no encryption."""
    server_key_file: Path | None = None
    """The publisher's public key."""


@dataclass(slots=True)
class KVEventReader:
    """Follows one publisher.

    Attributes:
        num_batches, num_replayed, num_lost: Batches that came, that came by a replay, and that are lost.
        num_restarts: How often the publisher began anew.
        num_wrong: Messages that are no batch.
    """

    source: KVEventSource
    num_batches: int = 0
    num_replayed: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_wrong: int = 0
    _next: int = field(default=0, init=False)
    _known: dict[int, bytes] = field(default_factory=dict, init=False)
    """What the last replay brought and the subscription may bring again; bounded by what the publisher keeps."""

    async def read(self) -> AsyncGenerator[tuple[int, EventBatch], None]:
        """Yield batches with their numbers, in order and each once, without end. Batches that were missed are asked for
        again; where that fails, or the publisher has begun anew, ``AllBlocksCleared`` comes first: what was known of
        the cache may be wrong.

        Raises ``InvalidArgument`` for a wrong address or key.
        """
        zmq = _zmq()
        with zmq.asyncio.Context() as context:
            live = _connected(context, zmq.SUB, self.source.endpoint, self.source)
            with live:
                live.set(zmq.SUBSCRIBE, self.source.topic.encode())
                # It may have published before us, and be silent for long.
                async for batch in self._in_order(await self._replayed(context)):
                    yield batch
                while True:
                    if not await live.poll(round(IDLE_SECONDS * 1000)):
                        async for batch in self._in_order(await self._replayed(context)):
                            yield batch
                        continue
                    frames = await live.recv_multipart()
                    number = _number(frames)
                    if number is None:
                        self.num_wrong += 1
                        continue
                    payload = frames[2]
                    if self._known.pop(number, None) == payload:  # it came by a replay already
                        continue
                    if number < self._next:
                        self.num_restarts += 1
                        self._next = 0
                        yield number, EventBatch(0.0, [ClearedBlocks()])
                    if number > self._next:
                        # Also what follows this message: the subscription brings it again, and it is known then.
                        async for batch in self._in_order(await self._replayed(context)):
                            yield batch
                        self._known.pop(number, None)
                        if number < self._next:
                            continue
                    async for batch in self._in_order([(number, payload)], by_replay=False):
                        yield batch

    async def _in_order(
        self, batches: list[tuple[int, bytes]], *, by_replay: bool = True
    ) -> AsyncIterator[tuple[int, EventBatch]]:
        """Yield consecutive batches; before those that follow a gap, that nothing is known."""
        self.num_replayed += len(batches) if by_replay else 0
        for number, payload in batches:
            if lost := number - self._next:
                self.num_lost += lost
                yield number, EventBatch(0.0, [ClearedBlocks()])
            self._next = number + 1
            if (batch := self._batch(payload)) is not None:
                yield number, batch

    def _batch(self, payload: bytes) -> EventBatch | None:
        try:
            batch = read_batch(payload)
        except InvalidArgument as error:
            log.warning("%s: %s", self.source.endpoint, error.message)
            self.num_wrong += 1
            return None
        self.num_batches += 1
        return batch

    async def _replayed(self, context: Any) -> list[tuple[int, bytes]]:
        """Return the batches from the next one on, as far as the publisher has them."""
        if self.source.replay_endpoint is None:
            return []
        zmq, first = _zmq(), self._next
        found = self._known = {}
        socket = _connected(context, zmq.DEALER, self.source.replay_endpoint, self.source)
        try:
            async with asyncio.timeout(REPLAY_SECONDS) as limit:
                await socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
                # Until the end, or what is no answer.
                while (number := _number(frames := (await socket.recv_multipart())[1:])) is not None:
                    limit.reschedule(asyncio.get_running_loop().time() + REPLAY_SECONDS)
                    if first <= number:
                        found[number] = frames[2]
        except TimeoutError:
            log.warning("%s did not answer", self.source.replay_endpoint)
        finally:
            socket.close()
        return sorted(found.items())


def _number(frames: list[bytes]) -> int | None:
    """Return the number of a batch; None for the end of a replay, and for what is no batch."""
    if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES or frames[1] == END:
        return None
    return int.from_bytes(frames[1], "big")


def _connected(context: Any, kind: int, endpoint: str, source: KVEventSource) -> Any:
    """Return a socket. Raises ``InvalidArgument`` for a wrong address or key."""
    zmq = _zmq()
    socket = context.socket(kind)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RCVHWM, 100_000)
        if (source.key_file is None) != (source.server_key_file is None):
            raise InvalidArgument("our key and that of the publisher are needed together")
        if source.key_file is not None and source.server_key_file is not None:
            socket.curve_publickey, socket.curve_secretkey = load_key(source.key_file, is_secret=True)
            socket.curve_serverkey, _ = load_key(source.server_key_file)
        socket.connect(endpoint)
    except (zmq.ZMQError, InvalidArgument) as error:
        socket.close()
        reason = error.message if isinstance(error, InvalidArgument) else str(error)
        raise InvalidArgument(f"{endpoint}: {reason}") from None
    return socket


def load_key(path: Path, *, is_secret: bool = False) -> tuple[bytes, bytes]:
    """Return the public and the secret half of a CURVE key; the latter is empty in files of public keys.

    Raises ``InvalidArgument`` for what is no such file.
    """
    import zmq.auth

    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} is no CURVE key as zmq.auth.create_certificates writes it: {error}") from None
    if is_secret and not secret:
        raise InvalidArgument(f"{path} has a public key only; use the file whose name ends with .key_secret")
    return public, secret or b""


def _zmq() -> Any:
    """Return the library, which services import only where events are published or read."""
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise Unavailable("pyzmq is not installed; KV events need it") from None
    return zmq
