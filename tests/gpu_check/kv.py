"""KV of 8k tokens of an 8B between two processes, over each transport, alone and while the reader decodes."""

import contextlib
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.gpu_check import llama_8b
from tests.gpu_check.rows import Rows
from tests.gpu_check.target import CPU, GPU, Target
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVReader, KVTransferError
from tokenloom.gpu_worker.kv_connector.device_pool import CudaIpc, copy_with_torch, make_device_pool
from tokenloom.gpu_worker.kv_connector.kv_transports import make_transports

_NAMES = ("cuda", "shm", "socket")
_LAYOUT = "gpu-check"
_START_SECONDS = 30.0


def run(rows: Rows, target: Target = GPU) -> None:
    """Read from a pool of a process of its own; rows say which transport could not be used."""
    num_blocks = target.pick(512, 4)
    pool = make_pool(target, 2 * num_blocks)
    with _owner(target, num_blocks) as endpoints:
        readers = dict(_open(rows, endpoints))
        for name, reader in readers.items():
            _alone(rows, target, name, reader, pool, num_blocks)
        with tempfile.TemporaryDirectory(prefix="tl-8b-") as folder:
            _decode_meanwhile(rows, target, Path(folder), readers, pool, num_blocks)
        for reader in readers.values():
            reader.close()


def make_pool(target: Target, num_blocks: int) -> KVPool:
    """Return a pool of the shape of an 8B: 32 layers, blocks of 16 tokens with 8 heads of 128."""
    layers, shape = target.pick((32, (8, 16, 128)), (2, (1, 4, 16)))
    caches = torch.zeros(layers, 2, num_blocks, *shape, dtype=target.dtype, device=target.device)
    copy = copy_with_torch
    if target.has_gpu:
        from tokenloom.gpu_worker.cuda.row_kernels import copy_pool_blocks as copy
    return make_device_pool(caches.unbind(), num_blocks, _LAYOUT, copy, CudaIpc())


@contextlib.contextmanager
def _owner(target: Target, num_blocks: int) -> Iterator[dict[str, bytes]]:
    """Provide the endpoints of a process that serves a pool."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, target.is_tiny, num_blocks), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends the wait for it
    try:
        if not ours.poll(_START_SECONDS):
            raise RuntimeError("the owner's process did not start in time")
        yield ours.recv()
    finally:
        ours.close()
        process.join(5)
        process.kill()


def _serve(connection: Connection, is_tiny: bool, num_blocks: int) -> None:
    target = CPU if is_tiny else GPU
    pool = make_pool(target, num_blocks)
    transports = make_transports(_NAMES, on_host=False)
    endpoints = {}
    for transport in transports:
        if (endpoint := transport.serve(pool)) is not None:
            endpoints[transport.name] = endpoint
    connection.send(endpoints)
    with contextlib.suppress(EOFError):
        connection.recv()
    for transport in transports:
        transport.close()


def _open(rows: Rows, endpoints: dict[str, bytes]) -> Iterator[tuple[str, KVReader]]:
    for transport in make_transports(_NAMES, on_host=False):
        if transport.name not in endpoints:
            rows.skip(f"KV, {transport.name}", "the owner could not serve it")
            continue
        yield transport.name, transport.open(endpoints[transport.name], _LAYOUT)


def _alone(rows: Rows, target: Target, name: str, reader: KVReader, pool: KVPool, num_blocks: int) -> None:
    """Contiguous blocks, and blocks in an order that no two are adjacent in."""
    orders: dict[str, Sequence[int]] = {
        "in order": range(num_blocks),
        "scattered": torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist(),
    }
    for order, ids in orders.items():
        try:
            times = []
            for _ in range(target.pick(6, 2)):
                started = time.perf_counter()
                reader.read(ids, ids, pool)
                times.append(time.perf_counter() - started)
        except KVTransferError as error:
            rows.skip(f"KV, {name}, {order}", str(error))
            return
        seconds = sorted(times)[len(times) // 2]
        nbytes = num_blocks * pool.block_bytes
        rows.add(f"KV, {name}, {order}", ms=seconds * 1e3, gb_per_s=nbytes / seconds / 1e9, megabytes=nbytes / 1e6)


def _decode_meanwhile(
    rows: Rows, target: Target, folder: Path, readers: dict[str, KVReader], pool: KVPool, num_blocks: int
) -> None:
    """Decode 32 requests with 8 layers of an 8B, while another thread reads KV again and again."""
    count, length, num_steps = target.pick((32, 512, 50), (2, 8, 3))
    options = {"max_num_seqs": count, "max_model_len": length + 512, "pool_tokens": count * (length + 768)}
    with llama_8b.loaded(folder, target, num_layers=target.pick(8, 2), **options) as driver:
        for name in [None, *readers]:
            names = llama_8b.begin(driver, count, length)
            with _reading(None if name is None else readers[name], pool, num_blocks) as num_reads:
                ms = llama_8b.step_ms(lambda names=names: driver.decode(names), num_steps)
            driver.end(names)
            if name is None:
                alone = ms
                rows.add("8 layers of an 8B, 32 decodes", ms=ms)
            else:
                rows.add(f"the same while KV moves by {name}", ms=ms, slower=ms / alone - 1, reads=len(num_reads))


@contextlib.contextmanager
def _reading(reader: KVReader | None, pool: KVPool, num_blocks: int) -> Iterator[list[int]]:
    """Read all blocks over and over on a thread. Provides a list that has an entry for each read."""
    ended, reads = threading.Event(), list[int]()

    def read() -> None:
        assert reader is not None
        with contextlib.suppress(KVTransferError):
            while not ended.is_set():
                reader.read(range(num_blocks), range(num_blocks, 2 * num_blocks), pool)
                reads.append(num_blocks)

    thread = threading.Thread(target=read) if reader is not None else None
    if thread is not None:
        thread.start()
    try:
        yield reads
    finally:
        ended.set()
        if thread is not None:
            thread.join()
