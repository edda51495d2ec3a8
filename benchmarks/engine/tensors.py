"""Compares two ways to move an array between an engine's processes: a frame of a message, and shared memory.

    python -m tokenloom.bench.engine.tensors

An array is sent as a client sends it to its core; the other process adds it up and answers. Both ways take turns, array
by array, so that a disturbance affects both. Held is how long the sender is blocked; it copies the array either way.
"""

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.array_arena import ArenaAddress, ArenaReader, ArrayArena
from tokenloom.engine_core.wire.frames import Decoder, FrameReceiver, FrameSender

SIZES_KIB = (16, 32, 64, 128, 256, 1024, 8192, 32768)
WAYS = ("frame", "shared memory")
_WARM_UP = 3
"""Rounds that do not count, in which pages are touched and buffers are allocated."""


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
    with _receiver(max(sizes_kib) << 11) as (connection, arena):
        for kib in sizes_kib:
            array = np.random.default_rng(kib).random(kib << 8, dtype=np.float32)
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            for _ in range(rounds + _WARM_UP):
                for way in WAYS:
                    times[way].append(_send(connection, array, arena if way == "shared memory" else None))
            for way in WAYS:
                answered, held = zip(*times[way][_WARM_UP:], strict=True)
                results.append(Result(kib, way, statistics.median(answered) * 1e3, statistics.median(held) * 1e3))
    return results


def _send(connection: socket.socket, array: npt.NDArray[np.float32], arena: ArrayArena | None) -> tuple[float, float]:
    sender, receiver = FrameSender(connection), FrameReceiver(connection)
    began = time.perf_counter()
    if arena is None:
        sender.send(Message(array))
    else:
        with arena.lend() as loan:
            sender.send(Message(array), loan=loan)
            assert arena.num_lent, "there is room for each"
    held = time.perf_counter() - began
    answer = float(bytes(receiver.receive()[0]))
    answered = time.perf_counter() - began
    if answer != float(array.sum()):
        raise SystemExit(f"an array of {array.nbytes} bytes arrived wrong")
    return answered, held


@contextlib.contextmanager
def _receiver(arena_bytes: int) -> Iterator[tuple[socket.socket, ArrayArena]]:
    """Runs a process that answers with sums."""
    arena = ArrayArena(arena_bytes, min_bytes=0)  # this benchmark measures what the least size should be
    if (arrays := arena.address) is None:
        raise SystemExit("this system has no shared memory")
    near, far = socket.socketpair()
    with near, far:
        command = [sys.executable, "-m", "tokenloom.bench.engine.tensors", "--receive", str(far.fileno())]
        command += ["--arena", json.dumps(msgspec.to_builtins(arrays))]
        process = subprocess.Popen(command, pass_fds=(far.fileno(), arrays.fd))
        try:
            yield near, arena
        finally:
            process.kill()
            process.wait()
            arena.close()


def receive(descriptor: int, arrays: ArenaAddress) -> None:
    """Answer until the process is killed."""
    decoder = Decoder(Message, ArenaReader(arrays))
    with socket.socket(fileno=descriptor) as connection:
        sender, receiver = FrameSender(connection), FrameReceiver(connection)
        while True:
            message = decoder.decode(receiver.receive())
            answer = repr(float(message.rows.sum()))
            del message  # dropping the array returns its region before the sender can look
            sender.send_frames([answer.encode()])


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
    parser.add_argument("--receive", type=int, metavar="DESCRIPTOR", help=argparse.SUPPRESS)
    parser.add_argument("--arena", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.receive is not None:
        receive(options.receive, msgspec.json.decode(options.arena, type=ArenaAddress))
        return
    results = measure(options.kib, options.rounds)
    if options.json:
        print(json.dumps([vars(result) for result in results], indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
