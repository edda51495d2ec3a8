"""Measures how fast KV blocks move by every available way, against a plain ``copy_`` of the same blocks.

The owner of the blocks is a process of its own. Blocks are scattered at random on both sides; every way takes its turn
in each round, so that a disturbance affects all of them, and the table shows medians.
"""

import contextlib
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.engine_core.kv_transfer.offload_tier import OffloadTier, TierLoad, TierSave
from tokenloom.gpu_worker.kv_connector import nixl

from ..report import machine
from . import kv_owner
from .kv_shape import SHAPES, Shape

BASELINE = "copy_"
OFFLOAD = "offload"
WAYS = ("shm", "socket (unix)", "socket (tcp)", "nixl", OFFLOAD)
"""Names with brackets are one transport over two kinds of sockets."""

Move = Callable[[], None]


@dataclass(frozen=True)
class Result:
    """Holds the result of one way of moving one shape's blocks."""

    shape: str
    way: str
    gib_per_second: float
    ms: float
    """The median."""
    share: float
    """The share of the plain copy's speed in the same run."""


def measure(shape: Shape, ways: list[str], seconds: float) -> list[Result]:
    """Move the shape's blocks by each way in turn, for so many seconds each."""
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
    """Copy within one process, the fastest way: one block with all its regions in each call."""
    source = shape.make_pool(shared=False)
    shape.fill(source)
    there, here = torch.from_numpy(source.planes[0]), torch.from_numpy(target.planes[0])
    pairs = list(zip(shape.scatter(0).tolist(), shape.scatter(1).tolist(), strict=True))

    def move() -> None:
        for source_id, target_id in pairs:
            here[:, target_id].copy_(there[:, source_id])

    return move


def _check(shape: Shape, target: KVPool, way: str, move: Move) -> None:
    """Check that every byte arrived, and none at another place."""
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
    transports = kv_owner.transports([way for way in ways if way != OFFLOAD])
    with contextlib.ExitStack() as stack:
        moves: dict[str, Move] = {}
        if transports:
            owner = subprocess.Popen(
                kv_owner.command(shape, [*transports]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(owner.wait)
            assert owner.stdin is not None
            assert owner.stdout is not None
            stack.enter_context(owner.stdout)
            stack.enter_context(owner.stdin)  # closing it ends the owner
            # nixl prints to standard output too
            endpoints = json.loads(next(line for line in owner.stdout if line.startswith("{")))
            for way, transport in transports.items():
                stack.callback(transport.close)
                reader = transport.open(bytes.fromhex(endpoints[way]), shape.name)
                moves[way] = lambda reader=reader: reader.read(shape.scatter(0), shape.scatter(1), target)  # type: ignore[misc]
        if OFFLOAD in ways:
            moves[OFFLOAD] = stack.enter_context(_offload(shape, target))
        yield moves


@contextlib.contextmanager
def _offload(shape: Shape, target: KVPool) -> Iterator[Move]:
    """Read from the file, which the operating system still has in memory."""
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
            while not tier.has_room(target.block_bytes):
                time.sleep(0.001)
            tier.save(TierSave(slot, hashes[slot], b"".join(view[block_id].data for view in source.views)))
        load = TierLoad("", list(range(len(ids))), hashes, shape.scatter(1).tolist(), range(len(ids)))

        def move() -> None:
            tier.load(load)
            done.acquire()
            if loaded.pop() != (len(ids), ""):
                raise SystemExit("the offload file lost blocks")

        yield move


def run(ways: Sequence[str], pool_bytes: int, seconds: float, done: Callable[[], object]) -> dict[str, Any]:
    """Measure all shapes by the named ways, or by all that work here. Calls ``done`` after each shape.

    Raises:
        ValueError: A way is unknown, or does not work on this machine.
    """
    working = [way for way in WAYS if way != "nixl" or nixl.is_available()]
    known = {*working, *(way.partition(" ")[0] for way in working)}
    if unknown := [way for way in ways if way not in known]:
        raise ValueError(f"the way {unknown[0]!r} does not work on this machine; available: {', '.join(working)}")
    chosen = [way for way in working if not ways or way in ways or way.partition(" ")[0] in ways]
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        results += measure(replace(shape, pool_bytes=pool_bytes), chosen, seconds)
        done()
    return {"machine": machine.describe(), "results": [asdict(result) for result in results]}


def tables(report: dict[str, Any]) -> list[Table]:
    """Make one table for each shape."""
    shown: dict[str, Table] = {}
    for result in report["results"]:
        table = shown.get(result["shape"])
        if table is None:
            title = f"{result['shape']}: a quarter of the pool"
            table = shown[result["shape"]] = Table(title=title, title_justify="left", title_style="bold")
            table.add_column("")
            for name in ("GiB/s", "ms", f"of {BASELINE}"):
                table.add_column(name, justify="right")
        figures = (f"{result['gib_per_second']:.1f}", f"{result['ms']:.2f}", f"{result['share']:.0%}")
        table.add_row(result["way"], *figures)
    return list(shown.values())
