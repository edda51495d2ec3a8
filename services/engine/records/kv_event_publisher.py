"""Publishes the events of the prefix cache over ZeroMQ as vLLM's engines do, for routers of others."""

import asyncio
import contextlib
import logging
import socket as socketlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import zmq
import zmq.asyncio
import zmq.auth.asyncio

from tokenloom.engine_core.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, listed_ids
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.telemetry.kv_events import (
    END,
    NUMBER_BYTES,
    ClearedBlocks,
    EventBatch,
    Published,
    RemovedBlocks,
    StoredBlocks,
    load_key,
    short_hash,
)

from .engine_settings import KVEventsConfig

log = logging.getLogger(__name__)

_DOMAIN: Final = "kv-events"
_SENT_PER_TURN: Final = 32
"""Batches of a replay that are sent before the event loop serves others: a millisecond or two."""


class KVEventPublisher:
    """Numbers the batches of an engine from 0 on, and keeps the last ones for those who missed them.

    Blocks are named by 64 bits of their hashes, which the salt of their tenant is part of.

    Attributes:
        endpoint, replay_endpoint: Where it is bound; the latter is empty if nothing is replayed.
        num_published: Batches.
    """

    def __init__(self, config: KVEventsConfig, rank: int, clock: Callable[[], float]) -> None:
        """``rank``: of the engine in its data-parallel group. ``clock``: returns seconds since 1970.

        Raises ``InvalidArgument`` for an address that cannot be bound and for a wrong key. Needs a running loop.
        """
        self._rank, self._clock = rank, clock
        self._topic, self._shows_ids = config.topic.encode(), config.token_ids
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self.num_published = 0
        self._context = zmq.asyncio.Context()
        self._admission: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._replay: zmq.asyncio.Socket | None = None
        # A plain socket: a PUB socket never waits, it drops what a slow subscriber has no room for.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._pub = plain.socket(zmq.PUB)
        self.endpoint = self.replay_endpoint = ""
        try:
            if config.curve_key_file:
                self._admit(Path(config.curve_clients))
            self._pub.set_hwm(config.hwm)
            self.endpoint = self._bind(self._pub, config, "endpoint", config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A router drops what a peer has no room for: each may be sent all that is kept.
                self._replay.set(zmq.SNDHWM, config.buffer_steps + 1)
                self.replay_endpoint = self._bind(self._replay, config, "replay_endpoint", config.replay_endpoint)
        except BaseException:
            self.close()
            raise

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send the events of one step, those that vLLM has too."""
        published = list(_published(events, shows_ids=self._shows_ids))
        if not published:
            return
        payload = self._encode(EventBatch(self._clock(), published, self._rank))
        number = self.num_published.to_bytes(NUMBER_BYTES, "big")
        self.num_published += 1
        self._kept.append((number, payload))
        try:
            self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # an engine goes on without its subscribers, who ask for what they missed
            log.warning("the KV events of a step were not sent: %s", error)

    async def run(self) -> NoReturn:
        """Answer those who missed batches, until cancelled."""
        assert self._replay is not None, "nothing is replayed"
        while True:
            frames = await self._replay.recv_multipart()
            await asyncio.sleep(0)  # neither to receive nor to send waits while there is something, or room
            if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
                log.warning("a request for missed KV events is no sequence number")
                continue
            try:
                await self._send_kept(self._replay, frames[0], frames[2])
            except Exception as error:  # of one peer: an engine outlives its subscribers
                log.warning("missed KV events were not sent: %s", error)

    async def _send_kept(self, socket: zmq.asyncio.Socket, peer: bytes, first: bytes) -> None:
        """Send all batches from number ``first`` on that are kept. Big-endian numbers compare as bytes."""
        missed = [batch for batch in self._kept if batch[0] >= first]
        for at, (number, payload) in enumerate(missed):
            if at % _SENT_PER_TURN == 0:
                await asyncio.sleep(0)
            await socket.send_multipart((peer, b"", self._topic, number, payload))
        await socket.send_multipart((peer, b"", b"", END, b""))

    def close(self) -> None:
        """End the connections. Idempotent."""
        if self._admission is not None:
            self._admission.stop()
            self._admission = None
        self._pub.close(linger=0)  # the context would wait for it: it is not one of its own
        self._context.destroy(linger=0)

    def _admit(self, clients: Path) -> None:
        """Admit only subscribers whose public keys are in a folder."""
        if not clients.is_dir():
            raise InvalidArgument(f"kv_events_config: curve_clients: {clients} is no folder")
        self._admission = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._admission.start()
        self._admission.configure_curve(domain=_DOMAIN, location=str(clients))

    def _bind(self, socket: "zmq.Socket[Any]", config: KVEventsConfig, name: str, endpoint: str) -> str:
        """Bind a socket and return its address. Raises ``InvalidArgument``."""
        if config.curve_key_file:
            socket.curve_publickey, socket.curve_secretkey = load_key(Path(config.curve_key_file), is_secret=True)
            socket.curve_server = True
            socket.zap_domain = _DOMAIN.encode()
        endpoint = of_rank(endpoint, self._rank)
        if endpoint.startswith("tcp://["):
            socket.set(zmq.IPV6, 1)
        try:
            if endpoint.startswith("ipc://"):
                _check_free(endpoint.removeprefix("ipc://"))
            socket.bind(endpoint)
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            reason = f"{endpoint} cannot be bound: {error}; engines of one host need an address each, or port 0"
            raise InvalidArgument(f"kv_events_config: {name}: {reason}") from None
        return str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _check_free(path: str) -> None:
    """Raise ``OSError`` for a socket at which another process listens: ZeroMQ would put its own in its place."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.settimeout(1)
        probe.connect(path)
        raise FileExistsError("another process listens there")


def of_rank(endpoint: str, rank: int) -> str:
    """Return the address of a rank of a data-parallel group: as in vLLM, its port is so much higher."""
    place, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{place}:{int(port) + rank}" if int(port) else endpoint


def _published(events: Sequence[KVCacheEvent], *, shows_ids: bool) -> Iterator[Published]:
    for event in events:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                yield StoredBlocks(
                    block_hashes=[short_hash(each) for each in event.block_hashes],
                    parent_block_hash=None if parent is None else short_hash(parent),
                    token_ids=listed_ids(event.token_ids) if shows_ids else [],
                    block_size=event.block_size,
                    lora_id=None,
                    medium=event.medium,
                    lora_name=None,
                )
            case BlockRemoved():
                hashes: list[int | bytes] = [short_hash(each) for each in event.block_hashes]
                yield RemovedBlocks(block_hashes=hashes, medium=event.medium)
            case AllBlocksCleared():
                yield ClearedBlocks()
            case _:  # states of layers, which have no form in vLLM's events
                continue
