"""Compares two ways to add the tensors of ranks on one machine: over shared memory, and over gloo's sockets.

``python -m tokenloom.bench.engine.all_reduce`` runs two ranks on threads, in turns, and prints microseconds for each
sum of hidden states of one token, of a batch that decodes, and of a chunk of a prompt.
"""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from msgspec.structs import replace

from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.gpu_worker.parallel.group import RankGroup
from tokenloom.gpu_worker.parallel.ranks import join_ranks
from tokenloom.gpu_worker.parallel.shared_group import RecordableGroup, SharedGroup

_HIDDEN_SIZE = 1024
_TOKENS = (1, 32, 512)
_REPEATS = 200
_TURNS = 5


def _seconds(group: RankGroup, num_tokens: int) -> float:
    x = torch.ones(num_tokens, _HIDDEN_SIZE)
    group.all_reduce(x)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        group.all_reduce(x)
    return (time.perf_counter() - started) / _REPEATS


def _rank(directory: Path, rank: int) -> dict[tuple[str, int], float]:
    config = replace(ParallelConfig(tensor_parallel_size=2), rank=rank, rendezvous=str(directory / "store"))
    group = join_ranks(config, torch.device("cpu")).group
    assert isinstance(group, RecordableGroup)
    shared = group.inner
    assert isinstance(shared, SharedGroup), "there is no compiler for the kernel"
    found: dict[tuple[str, int], float] = {}
    for _ in range(_TURNS):
        for name, group in (("shared memory", shared), ("gloo", shared.inner)):
            for count in _TOKENS:
                key = (name, count)
                found[key] = min(found.get(key, float("inf")), _seconds(group, count))
    return found


def main() -> None:
    """Print the least time of each sum."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(2) as threads:
        found, _ = threads.map(lambda rank: _rank(Path(directory), rank), range(2))
    for name in ("shared memory", "gloo"):
        times = ", ".join(f"{found[name, count] * 1e6:.0f} µs for {count} tokens" for count in _TOKENS)
        print(f"{name}: {times} of {_HIDDEN_SIZE} floats")


if __name__ == "__main__":
    main()
