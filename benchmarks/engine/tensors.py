"""Compares two ways to move an array between an engine's processes: a frame of a ZMQ message, and shared memory.

    python -m tokenloom.bench.engine.tensors

An array is sent as a client sends it to its core; the other process adds it up and answers. Both ways take turns, array
by array, so that a disturbance affects both. Held is how long the sender is blocked: ZMQ's thread copies a frame, but
the sender itself copies into shared memory.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from tokenloom.engine_core.wire.array_arena import ArenaAddress, ArenaReader, ArrayArena
from tokenloom.engine_core.wire.frames import FrameSender, receive_frames
from tokenloom.engine_core.wire.serialization import Decoder

SIZES_KIB = (16, 32, 64, 128, 256, 1024, 8192, 32768)
WAYS = ("frame", "shared memory")
_WARM_UP = 3
"""Rounds that do not count, in which pages are touched and buffers are allocated."""

Socket = zmq.Socket[bytes]


class Message(msgspec.Struct, array_like=True):
    """Says what is sent."""

    rows: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Result:
    """Holds the medians of one size and one way."""

    kib: int
    way: str
    ms: float
    """Time until the answer."""
    held_ms: float
    """Time until the sender could continue."""


def measure(sizes_kib: Sequence[int], rounds: int) -> list[Result]:
    """Send an array of each size ``rounds`` times each way."""
    results = []
    with _receiver(max(sizes_kib) << 11) as (socket, arena):
        sender = FrameSender(socket)
        for kib in sizes_kib:
            array = np.random.default_rng(kib).random(kib << 8, dtype=np.float32)
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(rounds + _WARM_UP):
                for way in WAYS:
                    times[way].append(_send(socket, sender, array, arena if way == "shared memory" else None))
            for way in WAYS:
                answered, held = zip(*times[way][_WARM_UP:], strict=True)
                results.append(Result(kib, way, statistics.median(answered) * 1e3, statistics.median(held) * 1e3))
    return results


def _send(
    socket: Socket, sender: FrameSender, array: npt.NDArray[np.float32], arena: ArrayArena | None
) -> tuple[float, float]:
    began = time.perf_counter()
    if arena is None:
        sender.send(Message(array))
    else:
        with arena.lend() as loan:
            sender.send(Message(array), loan=loan)
        assert loan.regions, "there is room for each"
    held = time.perf_counter() - began
    answer = float(socket.recv())
    answered = time.perf_counter() - began
    if answer != float(array.sum()):
        raise SystemExit(f"an array of {array.nbytes} bytes arrived wrong")
    return answered, held


@contextlib.contextmanager
def _receiver(arena_bytes: int) -> Iterator[tuple[Socket, ArrayArena]]:
    """Runs a process that answers with sums."""
    arena = ArrayArena(arena_bytes, min_bytes=0)  # this benchmark measures what the least size should be
    if (arrays := arena.address) is None:
        raise SystemExit("this system has no shared memory")
    with (
        tempfile.TemporaryDirectory(prefix="tl-tensors-") as directory,
        zmq.Context() as context,
        context.socket(zmq.PAIR) as socket,
    ):
        socket.linger = 0
        socket.bind(address := f"ipc://{directory}/socket")
        command = [sys.executable, "-m", "tokenloom.bench.engine.tensors", "--receive", address]
        command += ["--arena", json.dumps(msgspec.to_builtins(arrays))]
        process = subprocess.Popen(command, pass_fds=(arrays.fd,))
        try:
            yield socket, arena
        finally:
            process.kill()
            process.wait()
            arena.close()


def receive(address: str, arrays: ArenaAddress) -> None:
    """Answer until the process is killed."""
    decoder = Decoder(Message, ArenaReader(arrays))
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(address)
        while True:
            message = decoder.decode(receive_frames(socket, num_small=1))
            answer = repr(float(message.rows.sum()))
            del message  # dropping the array returns its region before the sender can look
            socket.send(answer.encode())


def show(results: list[Result]) -> None:
    """Make a line for each size."""
    print(f"  {'KiB':>6}{'frame ms':>10}{'held':>8}{'shared ms':>11}{'held':>8}{'shared / frame':>16}")
    for frame, shared in zip(results[::2], results[1::2], strict=True):
        line = f"  {frame.kib:>6}{frame.ms:>10.3f}{frame.held_ms:>8.3f}{shared.ms:>11.3f}{shared.held_ms:>8.3f}"
        print(f"{line}{shared.ms / frame.ms:>16.2f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=SIZES_KIB, help="sizes of the array")
    parser.add_argument("--rounds", type=int, default=50, help="how many arrays of each size each way sends")
    parser.add_argument("--json", action="store_true", help="print results as JSON instead of a table")
    parser.add_argument("--receive", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--arena", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.receive:
        receive(options.receive, msgspec.json.decode(options.arena, type=ArenaAddress))
        return
    results = measure(options.kib, options.rounds)
    if options.json:
        print(json.dumps([vars(result) for result in results], indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
