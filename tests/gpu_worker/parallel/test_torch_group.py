"""Tests sums and gathered columns over shared memory, and over gloo, between ranks that are threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from tests.gpu_worker.parallel.rank_threads import parallel
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.parallel import torch_group as shared_group
from tokenloom.gpu_worker.parallel.group import RankGroup
from tokenloom.gpu_worker.parallel.ranks import join_ranks
from tokenloom.gpu_worker.parallel.torch_group import RecordableGroup, SharedGroup, TorchGroup

CPU = torch.device("cpu")
SIZES = [1, 7, 64, 1000, (1 << 16) + 3, 3 << 16]
"""Elements; the shared memory holds 65,536 floats at once."""


def run_ranks(size: int, directory: Path, run: Callable[[RankGroup], object]) -> list[object]:
    def rank(number: int) -> object:
        config = replace(parallel(size), rank=number, rendezvous=str(directory / "store"))
        return run(join_ranks(config, CPU).group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES * 8]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_sum(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def add(group: RankGroup) -> list[torch.Tensor]:
        assert isinstance(group, RecordableGroup)
        assert isinstance(group.inner, SharedGroup)
        return [group.all_reduce(x) for x in tensors(group.rank, dtype)]

    first, *others = run_ranks(size, tmp_path, add)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    of_ranks = [tensors(rank, dtype) for rank in range(size)]
    expected = [torch.stack(parts).float().sum(0).to(dtype) for parts in zip(*of_ranks, strict=True)]
    for found, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_integers_are_added_and_compared(size: int, tmp_path: Path) -> None:
    def of(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-(1 << 29), 1 << 29, (n,), generator=generator, dtype=torch.int32) for n in SIZES]

    def join(group: RankGroup) -> list[torch.Tensor]:
        sums = [group.all_reduce(x) for x in of(group.rank)]
        return sums + [group.all_max(x) for x in of(group.rank)]

    parts = [torch.stack(each) for each in zip(*map(of, range(size)), strict=True)]
    expected = [each.sum(0, dtype=torch.int32) for each in parts] + [each.amax(0) for each in parts]
    for found in run_ranks(size, tmp_path, join):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gloo_replaces_the_memory_where_no_kernel_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_group, "load_sums", _unavailable)

    def add(group: RankGroup) -> tuple[list[float], list[list[float]], list[int]]:
        assert isinstance(group, RecordableGroup)
        assert isinstance(group.inner, TorchGroup)
        x = torch.tensor([1.0, 10.0]) * (group.rank + 1)
        largest = group.all_max(torch.tensor([7, -group.rank, group.rank], dtype=torch.int32))
        return group.all_reduce(x.clone()).tolist(), group.all_gather(x).tolist(), largest.tolist()

    assert run_ranks(2, tmp_path, add) == [([3.0, 30.0], [[1.0, 10.0], [2.0, 20.0]], [7, 0, 1])] * 2


SHAPES = [(1, 7), (3, 4), (0, 9), (1, 70_001), (5, 131_075), (64, 1031), (1, 2)]
"""Rows and columns of all ranks; the shared memory holds 65,536 floats of a rank at once."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("memory", ["shared", "sockets"])
def test_the_first_rank_gathers_columns(
    memory: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if memory == "sockets":
        monkeypatch.setattr(shared_group, "load_sums", _unavailable)
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(shape, generator=generator) for shape in SHAPES * 4]

    def gather(group: RankGroup) -> list[torch.Tensor]:
        assert isinstance(group, RecordableGroup)
        assert isinstance(group.inner, SharedGroup if memory == "shared" else TorchGroup)
        found = []
        for whole in wholes:
            first, end = (whole.shape[1] * border // size for border in (group.rank, group.rank + 1))
            out = None if group.rank else torch.empty_like(whole)
            group.gather_columns(whole[:, first:end].contiguous(), out, width=whole.shape[1])
            # A sum between them takes the other half of the memory.
            assert float(group.all_reduce(torch.ones(1))) == size
            found += [] if out is None else [out]
        return found

    first, *others = run_ranks(size, tmp_path, gather)
    assert others == [[]] * (size - 1)
    assert isinstance(first, list)
    assert all(torch.equal(found, whole) for found, whole in zip(first, wholes, strict=True))


def _unavailable() -> None:
    raise KernelsUnavailable("no compiler")
