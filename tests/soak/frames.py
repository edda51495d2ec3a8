"""``python -m tests.soak.frames``: whole, split, cancelled and broken streams of frames for everything that frames
messages on a socket, at the edges of their counts and sizes.

A whole stream must give the messages that were sent. A broken one must give messages that were sent, or the error that
is documented: nothing else, no hang, and no memory for bytes that never come.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc.aio
import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.client.async_core_client import AsyncSocket
from tokenloom.engine_core.data_parallel import messages as group
from tokenloom.engine_core.data_parallel.messages import Frames, decoder_of
from tokenloom.engine_core.wire.array_arena import ArenaReader, ArrayArena, Loan
from tokenloom.engine_core.wire.frames import (
    IOV_MAX,
    MAX_BYTES,
    MAX_FRAMES,
    MAX_INLINE_BYTES,
    READ_BYTES,
    Decoder,
    FrameReader,
    FrameReceiver,
    FrameSender,
    encode,
    head,
)
from tokenloom.gpu_worker.kv_connector.socket_frames import receive_frame, receive_into, send, send_frame
from tokenloom.request.errors import Internal, TokenloomError
from tokenloom.services.runtime.local_streams.socket_end import HEADER, Kind, decode_status, encode_status, split_frames

COUNTS = (1, 2, 3, 7, IOV_MAX - 2, IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 2 * IOV_MAX, 2 * IOV_MAX + 1)
SIZES = (0, 1, 3, 255, 256, 257, 4096)
LARGE_SIZES = (READ_BYTES - 13, READ_BYTES - 12, READ_BYTES - 11, READ_BYTES, READ_BYTES + 1, 3 * READ_BYTES)
EDGES = (0, 1, IOV_MAX, MAX_FRAMES, MAX_FRAMES + 1, MAX_BYTES, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
"""Numbers that a broken head may hold."""
SECONDS = 30.0
"""What takes longer hangs."""

_beside = ThreadPoolExecutor(1, thread_name_prefix="soak-frames")


def random_frames(rng: random.Random) -> list[bytes]:
    """Return the frames of a message: few of any size, or many small ones around the limit of one call."""
    count = rng.choice(COUNTS)
    sizes = SIZES[:5] if count > 8 else SIZES + LARGE_SIZES
    return [rng.randrange(256).to_bytes() * rng.choice(sizes) for _ in range(count)]


def broken(rng: random.Random, stream: bytes, number: struct.Struct) -> bytes:
    """Return a stream that is cut, repeated in part, noise, or has a number of this form at an edge."""
    if not stream:
        return rng.randbytes(40)
    at = rng.randrange(len(stream))
    kind = rng.randrange(5)
    if kind == 0:
        return stream[:at]
    if kind == 1:
        return stream[:at] + stream[rng.randrange(at + 1) :]
    if kind == 2:
        return stream[:at] + rng.randbytes(rng.randrange(1, 60))
    if kind == 3:
        return stream[:at] + bytes([stream[at] ^ (1 << rng.randrange(8))]) + stream[at + 1 :]
    at = rng.choice([0, 4, 12, at])
    packed = number.pack(rng.choice(EDGES) % 2 ** (8 * number.size))
    return stream[:at] + packed + stream[at + number.size :]


class Feed:
    """Stands for a socket that was closed after some bytes, of which each read returns at most the next few."""

    def __init__(self, stream: bytes, rng: random.Random) -> None:
        self._stream = memoryview(stream)
        self._sizes = rng.choice([[READ_BYTES], [1 << 20], [rng.randrange(1, 9000) for _ in range(5)]])
        if len(stream) < 4000:
            self._sizes = [*self._sizes, *[rng.randrange(1, 30) for _ in range(9)]]
        self._rng = rng

    def recv(self, most: int) -> bytes:
        count = min(most, self._rng.choice(self._sizes))
        data, self._stream = self._stream[:count], self._stream[count:]
        return bytes(data)

    def recvmsg_into(self, buffers: list[memoryview]) -> tuple[int]:
        assert 0 < len(buffers) <= IOV_MAX, "the system takes no more"
        moved = 0
        for buffer in buffers:
            data = self.recv(len(buffer))
            memoryview(buffer)[: len(data)] = data
            moved += len(data)
            if len(data) < len(buffer):
                break
        return (moved,)


# The socket between an engine's front and its core.


def wire_streams(rng: random.Random) -> None:
    """Messages are found however their stream is split; of a broken stream only those before the fault."""
    sent = [random_frames(rng) for _ in range(rng.randrange(1, 5))]
    stream = b"".join(head(frames) + b"".join(frames) for frames in sent)
    assert _found(stream, rng) == (sent, False)
    wrong = broken(rng, stream, rng.choice([struct.Struct("<I"), struct.Struct("<Q")]))
    whole, is_broken = _reference(wrong)
    found, was_refused = _found(wrong, rng)
    assert was_refused == is_broken, "a fault was not noticed, or one was that is none"
    assert found == (whole[: len(found)] if is_broken else whole)


def _found(stream: bytes, rng: random.Random) -> tuple[list[list[bytes]], bool]:
    """Return the messages that a reader finds, and whether it refuses the rest."""
    reader, found = FrameReader(), []
    connection = cast(socket.socket, Feed(stream, rng))
    try:
        while (messages := reader.read(connection)) is not None:
            found += [[bytes(frame) for frame in message] for message in messages]
    except ValueError:
        return found, True
    return found, False


def _reference(stream: bytes) -> tuple[list[list[bytes]], bool]:
    """Return the whole messages of a stream, and whether one follows that no sender writes."""
    found: list[list[bytes]] = []
    at = 0
    while len(stream) >= at + 4:
        (count,) = struct.unpack_from("<I", stream, at)
        if not 0 < count <= MAX_FRAMES:
            return found, True
        begin = at + 4 + 8 * count
        if len(stream) < begin:
            break
        sizes = struct.unpack_from(f"<{count}Q", stream, at + 4)
        if sum(sizes) > MAX_BYTES:
            return found, True
        if len(stream) < begin + sum(sizes):
            break
        frames = []
        for size in sizes:
            frames.append(stream[begin : begin + size])
            begin += size
        found.append(frames)
        at = begin
    return found, False


def wire_sockets(rng: random.Random) -> None:
    """Messages arrive over a real socket, between threads."""
    sent = [random_frames(rng) for _ in range(2)]
    with _pair() as (near, far):
        sender, receiver = FrameSender(near), FrameReceiver(far)
        sending = [_beside.submit(sender.send_frames, frames) for frames in sent]
        assert [receiver.receive() for _ in sent] == sent
        for each in sending:
            each.result(SECONDS)


class Note(msgspec.Struct, array_like=True):
    """Carries arrays that all hold its number."""

    number: int
    arrays: list[npt.NDArray[np.uint8]]


def client_cancellations(rng: random.Random) -> None:
    """Senders that are cancelled at any moment: each message arrives whole or not at all, with its own arrays."""
    asyncio.run(asyncio.wait_for(_client_cancellations(rng), SECONDS))


async def _client_cancellations(rng: random.Random) -> None:
    arena = ArrayArena(1 << 17, min_bytes=4096)
    with _pair() as (near, far):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        far.setblocking(False)
        link = _Link(AsyncSocket(near), arena, far)
        for number in range(rng.randrange(4, 16)):
            link.start(Note(number, _random_arrays(rng, number)))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
                link.cancel_one(rng) if rng.random() < 0.4 else link.read()
        while not all(task.done() for task in link.tasks.values()):
            await asyncio.sleep(0)
            link.read()
        link.start(last := Note(1000, []))  # completes what was cancelled in its middle
        while not link.received or link.received[-1] != last.number:
            await asyncio.sleep(0)
            link.read()
        link.check()
    gc.collect()
    assert arena.num_lent == 0, "a region is lost"
    arena.close()


class _Link:
    """Both ends of a socket of the client in one event loop."""

    def __init__(self, ours: AsyncSocket, arena: ArrayArena, far: socket.socket) -> None:
        self._ours = ours
        self._arena = arena
        self._far = far
        assert arena.address is not None
        address = msgspec.structs.replace(arena.address, fd=socket.dup(arena.address.fd))
        self._decoder = Decoder(Note, ArenaReader(address))
        self._reader = FrameReader()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._begun: list[int] = []
        self._cancelled: set[int] = set()
        self.received: list[int] = []

    def start(self, note: Note) -> None:
        self.tasks[note.number] = asyncio.create_task(self._send(note))

    async def _send(self, note: Note) -> None:
        with self._arena.lend() as loan:
            await self._ours.send(encode(note, loan), functools.partial(self._note_begin, note.number, loan))

    def _note_begin(self, number: int, loan: Loan) -> None:
        self._begun.append(number)
        loan.hand_over()

    def cancel_one(self, rng: random.Random) -> None:
        if live := [number for number, task in self.tasks.items() if not task.done()]:
            number = rng.choice(live)
            self._cancelled.add(number)
            self.tasks[number].cancel()

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for frames in self._reader.read(self._far) or ():
                note = self._decoder.decode(frames)
                assert all((array == note.number % 251).all() for array in note.arrays), "rows of another message"
                self.received.append(note.number)

    def check(self) -> None:
        assert self.received == self._begun, "what was begun arrives, in order, and nothing else"
        for number, task in self.tasks.items():
            assert number in self._cancelled or task.exception() is None
            assert number in self._cancelled or number in self._begun


def _random_arrays(rng: random.Random, number: int) -> list[npt.NDArray[np.uint8]]:
    if rng.random() < 0.03:  # one frame each
        return [np.full(MAX_INLINE_BYTES + 1, number % 251, np.uint8)] * rng.choice([IOV_MAX - 1, IOV_MAX, IOV_MAX + 1])
    sizes = (0, 1, MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1, 4000, 4096, 30_000)
    return [np.full(rng.choice(sizes), number % 251, np.uint8) for _ in range(rng.randrange(5))]


# The ranks of a data-parallel group and their hub.


def group_frames(rng: random.Random) -> None:
    """Messages arrive; anything else ends the connection with an ``OSError``."""
    number = rng.choice([0, 1, 2**31, 2**32, 2**63 - 1])
    sent: list[Any] = [
        group.GroupHello("g" * rng.choice([0, 1, 70]), rng.choice([0, 1, group.MAX_RANKS - 1]), {"dtype": "é"}),
        group.Vote(number, number, group.Want.RUN, rng.choice([1, 2, group.MAX_RANKS])),
        group.Proof(rng.randbytes(32)),
        group.Broken(number),
    ]
    rng.shuffle(sent)
    stream = b"".join(_with_length(message) for message in sent)
    with _closed_after(stream) as far:
        frames: Frames[Any] = Frames(far, decoder_of(group.ToHub))
        assert [frames.receive() for _ in sent] == sent
    with _closed_after(broken(rng, stream, struct.Struct("<I"))) as far, contextlib.suppress(OSError):
        frames = Frames(far, decoder_of(group.ToHub))
        while True:
            frames.receive()


def _with_length(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


# The sockets over which blocks of KV move.


class Request(msgspec.Struct, array_like=True):
    """Has the kinds of fields that the messages of transports have."""

    token: bytes
    layout: str
    num_blocks: int
    sizes: list[int]


def kv_messages(rng: random.Random) -> None:
    """Messages arrive; anything else is an ``OSError`` or a ``msgspec.DecodeError``."""
    number = rng.choice([0, 1, 2**31, 2**32, 2**64 - 1])
    sent = [Request(rng.randbytes(16), "é" * rng.choice([0, 1, 300]), number, [number] * rng.randrange(4))] * 2
    with _pair() as (near, far):
        for message in sent:
            send_frame(near, message)
        assert [receive_frame(far, Request) for _ in sent] == sent
    stream = broken(rng, b"".join(_with_length(message) for message in sent), struct.Struct("<I"))
    with _closed_after(stream) as far, contextlib.suppress(OSError, msgspec.DecodeError):
        while True:
            receive_frame(far, Request)


def kv_pieces(rng: random.Random) -> None:
    """Bytes in any number of pieces fill those of the other side, which are cut elsewhere."""
    content = b"".join(random_frames(rng))
    target = bytearray(len(content))
    with _pair() as (near, far):
        sending = _beside.submit(send, near, list(_cut(rng, memoryview(content))))
        receive_into(far, list(_cut(rng, memoryview(target))))
        sending.result(SECONDS)
    assert target == content


def _cut(rng: random.Random, whole: memoryview) -> Iterator[memoryview]:
    count = rng.choice(COUNTS)
    most = max(2, 2 * len(whole) // count)
    while len(whole):
        size = rng.randrange(1, most)
        yield whole[:size]
        whole = whole[size:]


# Streams between the services of one host.


def local_streams(rng: random.Random) -> None:
    """Frames are found however they are split. Broken ones give frames and then one error, and hold no more memory than
    a frame has."""
    limit = rng.choice([0, 1, 300, 70_000])
    sent = [(rng.choice(list(Kind)), rng.randbytes(rng.choice([0, 1, limit]))) for _ in range(rng.randrange(1, 9))]
    sent = [(kind, payload[:limit]) for kind, payload in sent]
    stream = b"".join(HEADER.pack(len(payload), kind) + payload for kind, payload in sent)
    assert _decoded(stream, limit, rng) == (sent, None)
    wrong = broken(rng, stream, struct.Struct("<I"))
    (once, error), (split, again) = _decoded(wrong, limit, random.Random(0)), _decoded(wrong, limit, rng)
    assert once == split
    assert (error is None) == (again is None)
    _check_status(rng)


def _decoded(stream: bytes, limit: int, rng: random.Random) -> tuple[list[tuple[Kind, bytes]], TokenloomError | None]:
    rest, feed, error = bytearray(), Feed(stream, rng), None
    found: list[tuple[Kind, bytes]] = []
    while error is None and (data := feed.recv(READ_BYTES)):
        complete, error = split_frames(rest, data, limit)
        found += complete
        assert len(rest) <= limit + HEADER.size or error is not None
    return found, error


def _check_status(rng: random.Random) -> None:
    payload = encode_status(grpc.StatusCode.ABORTED, "é", [("a-bin", b"\xff"), ("b", "text")])
    with contextlib.suppress(Internal):
        assert isinstance(decode_status(broken(rng, payload, struct.Struct("<I"))), grpc.aio.AioRpcError)


# All of them.


@contextlib.contextmanager
def _pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(SECONDS)
        far.settimeout(SECONDS)
        yield near, far


@contextlib.contextmanager
def _closed_after(stream: bytes) -> Iterator[socket.socket]:
    """Provide the end of a connection on which the peer has sent this and hung up."""
    with _pair() as (near, far):
        near.sendall(stream)
        near.close()
        yield far


CHECKS: tuple[Callable[[random.Random], None], ...] = (
    wire_streams,
    wire_sockets,
    client_cancellations,
    group_frames,
    kv_messages,
    kv_pieces,
    local_streams,
)


def check(seeds: range) -> None:
    """Run every check with every seed. Raises ``AssertionError`` with the name of the check and the seed."""
    for seed in seeds:
        for each in CHECKS:
            try:
                each(random.Random(f"{each.__name__} {seed}"))
            except Exception as error:
                raise AssertionError(f"{each.__name__}, seed {seed}: {type(error).__name__}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed; the others follow")
    arguments = parser.parse_args()
    started = time.monotonic()
    check(range(arguments.first, arguments.first + arguments.seeds))
    print(
        f"{arguments.seeds} seeds of {len(CHECKS)} checks, {time.monotonic() - started:.0f} s: every message arrived "
        "whole, in order and once, and every broken stream was refused"
    )


if __name__ == "__main__":
    main()
