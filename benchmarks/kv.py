"""How fast KV blocks move, by every way there is, against a plain ``copy_`` of the same blocks in one process.

    python -m benchmarks.kv                      # all transports that work here, all shapes
    python -m benchmarks.kv shm socket --seconds 3

The owner of the blocks is a process of its own. Blocks are scattered at random on both sides; every way takes its turn
in each round, so that a disturbance meets all of them, and each is shown by its median.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tokenloom.engine_core.kv_transport import IntArray, KVPool, KVRegion, KVTransport
from tokenloom.engine_core.offload_tier import OffloadTier, TierLoad, TierSave
from tokenloom.engine_core.pool_memory import PoolMemory
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.gpu_worker.kv_connector.registry import make_transports
from tokenloom.gpu_worker.kv_connector.tcp_socket import SocketTransport

BASELINE = "copy_"
WAYS = ("shm", "socket (unix)", "socket (tcp)", "nixl", "offload")
_MIB = 1 << 20

Move = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """A pool's layout, and how much of the pool moves at once."""

    name: str
    num_regions: int
    block_bytes: int
    """Of each region."""
    pool_bytes: int = 256 << 20

    @property
    def num_blocks(self) -> int:
        return self.pool_bytes // (self.num_regions * self.block_bytes)

    def make_pool(self, shared: bool) -> KVPool:
        size = self.num_blocks * self.block_bytes
        memory = PoolMemory.allocate(self.num_regions * size, shared)
        regions = tuple(KVRegion(index * size, self.block_bytes) for index in range(self.num_regions))
        return KVPool(memory, regions, self.num_blocks, self.name)

    def fill(self, pool: KVPool) -> None:
        """Each block says in every region which it is."""
        for region, view in enumerate(pool.views):
            view.view(np.uint32)[:] = (np.arange(self.num_blocks, dtype=np.uint32) * 64 + region)[:, None]

    def scatter(self, seed: int) -> IntArray:
        """A quarter of the blocks, in any order."""
        return np.random.default_rng(seed).permutation(self.num_blocks)[: self.num_blocks // 4]


SHAPES = (
    Shape("28 layers x 2 x 32 KiB (0.6b)", 56, 32 << 10),
    Shape("6 layers x 2 x 4 KiB", 12, 4 << 10),
    Shape("2 MiB in one piece", 1, 2 << 20),
    Shape("64 KiB in one piece", 1, 64 << 10),
)


@dataclass(frozen=True)
class Result:
    """One way of moving one shape's blocks."""

    shape: str
    way: str
    gib_per_second: float
    ms: float
    """Median."""
    share: float
    """Of the plain copy's speed in the same run."""


def measure(shape: Shape, ways: list[str], seconds: float) -> list[Result]:
    """Moves the shape's blocks by each way in turn, for so many seconds each."""
    target = shape.make_pool(shared=False)
    with contextlib.ExitStack() as stack:
        moves = {BASELINE: _plain_copy(shape, target)}
        moves |= stack.enter_context(_moves(shape, target, ways))
        for way, move in moves.items():
            _check(shape, target, way, move)
        times: dict[str, list[float]] = {way: [] for way in moves}
        end = time.perf_counter() + seconds * len(moves)
        while time.perf_counter() < end or len(times[BASELINE]) < 3:
            for way, move in moves.items():
                began = time.perf_counter()
                move()
                times[way].append(time.perf_counter() - began)
    nbytes = len(shape.scatter(0)) * target.block_bytes
    medians = {way: statistics.median(found) for way, found in times.items()}
    return [
        Result(shape.name, way, nbytes / median / (1 << 30), median * 1e3, medians[BASELINE] / median)
        for way, median in medians.items()
    ]


def _plain_copy(shape: Shape, target: KVPool) -> Move:
    """What one process can do at best: a block, all its regions, in each call."""
    source = shape.make_pool(shared=False)
    shape.fill(source)
    there, here = torch.from_numpy(source.planes[0]), torch.from_numpy(target.planes[0])
    pairs = list(zip(shape.scatter(0).tolist(), shape.scatter(1).tolist(), strict=True))

    def move() -> None:
        for source_id, target_id in pairs:
            here[:, target_id].copy_(there[:, source_id])

    return move


def _check(shape: Shape, target: KVPool, way: str, move: Move) -> None:
    """Every byte arrived, and none elsewhere."""
    expected = shape.make_pool(shared=False)
    shape.fill(expected)
    for view in target.views:
        view[:] = 255
    move()
    moved, others = shape.scatter(1), np.setdiff1d(np.arange(shape.num_blocks), shape.scatter(1))
    for there, here in zip(expected.views, target.views, strict=True):
        if not np.array_equal(here[moved], there[shape.scatter(0)]) or not (here[others] == 255).all():
            raise SystemExit(f"{way} moved wrong bytes of {shape.name}")


@contextlib.contextmanager
def _moves(shape: Shape, target: KVPool, ways: list[str]) -> Iterator[dict[str, Move]]:
    transports = _transports([way for way in ways if way != "offload"])
    command = [
        sys.executable,
        "-m",
        "benchmarks.kv",
        "--serve",
        shape.name,
        "--pool-mib",
        str(shape.pool_bytes // _MIB),
        *transports,
    ]
    with contextlib.ExitStack() as stack:
        moves: dict[str, Move] = {}
        if transports:
            owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(owner.wait)
            assert owner.stdin is not None
            assert owner.stdout is not None
            stack.enter_context(owner.stdout)
            stack.enter_context(owner.stdin)  # closing it ends the owner
            endpoints = json.loads(next(line for line in owner.stdout if line.startswith("{")))  # nixl prints, too
            for way, transport in transports.items():
                stack.callback(transport.close)
                reader = transport.open(bytes.fromhex(endpoints[way]), shape.name)
                moves[way] = lambda reader=reader: reader.read(shape.scatter(0), shape.scatter(1), target)  # type: ignore[misc]
        if "offload" in ways:
            moves["offload"] = stack.enter_context(_offload(shape, target))
        yield moves


@contextlib.contextmanager
def _offload(shape: Shape, target: KVPool) -> Iterator[Move]:
    """Reads from the file, which the operating system still has in memory."""
    source = shape.make_pool(shared=False)
    shape.fill(source)
    ids = shape.scatter(0).tolist()
    loaded: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        done = threading.Semaphore(0)

        def note(load: TierLoad, count: int, failure: str) -> None:
            loaded.append((count, failure))
            done.release()

        tier = OffloadTier(Path(directory), len(ids), target, note)
        stack.callback(tier.close)
        hashes = [b"%d" % block_id for block_id in ids]
        for slot, block_id in enumerate(ids):
            while not tier.has_room(1):
                time.sleep(0.001)
            tier.save(TierSave(slot, hashes[slot], b"".join(view[block_id].data for view in source.views)))
        load = TierLoad("", list(range(len(ids))), hashes, shape.scatter(1).tolist(), 0)

        def move() -> None:
            tier.load(load)
            done.acquire()
            if loaded.pop() != (len(ids), ""):
                raise SystemExit("the offload file lost blocks")

        yield move


def _transports(ways: list[str]) -> dict[str, KVTransport]:
    made: dict[str, KVTransport] = {}
    for way in ways:
        if way == "socket (tcp)":
            made[way] = SocketTransport("127.0.0.1:0")
        else:
            (made[way],) = make_transports([way.partition(" ")[0]])
    return made


def serve(shape: Shape, ways: list[str]) -> None:
    """The owner: says where its blocks are, and stays until its input ends."""
    pool = shape.make_pool(shared=True)
    shape.fill(pool)
    transports = _transports(ways)
    print(json.dumps({way: (transport.serve(pool) or b"").hex() for way, transport in transports.items()}), flush=True)
    sys.stdin.read()
    for transport in transports.values():
        transport.close()


def show(results: list[Result]) -> None:
    """A table by shape."""
    for shape in dict.fromkeys(result.shape for result in results):
        print(f"\n{shape}: a quarter of the pool\n")
        print(f"  {'':<14}{'GiB/s':>8}{'ms':>9}{'of copy_':>10}")
        for result in (result for result in results if result.shape == shape):
            print(f"  {result.way:<14}{result.gib_per_second:>8.1f}{result.ms:>9.2f}{result.share:>10.0%}")


def main(arguments: list[str] | None = None) -> None:
    working = [way for way in WAYS if way != "nixl" or nixl.is_available()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all that work here if none is named")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each way and shape")
    parser.add_argument("--json", action="store_true", help="print results as JSON instead of tables")
    parser.add_argument("--pool-mib", type=int, default=256, help="size of each pool; a quarter of it moves")
    parser.add_argument("--serve", metavar="SHAPE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shapes = [replace(shape, pool_bytes=options.pool_mib * _MIB) for shape in SHAPES]
    if options.serve:
        serve(next(shape for shape in shapes if shape.name == options.serve), options.ways)
        return
    ways = [way for way in working if not options.ways or way in options.ways or way.partition(" ")[0] in options.ways]
    results = [result for shape in shapes for result in measure(shape, ways, options.seconds)]
    if options.json:
        print(json.dumps([vars(result) for result in results], indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
