"""Every piece of a kernel's work is computed once, with OpenMP's threads and with those of the pool."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from ctypes import CDLL, POINTER, c_int32, c_int64
from pathlib import Path

import numpy as np
import pytest
import torch  # noqa: F401  loads the OpenMP runtime

from tokenloom.gpu_worker.kernels import compiler, threads
from tokenloom.gpu_worker.kernels.library import load_pool

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
CSRC = Path(compiler.__file__).parent / "csrc"
MANY = 128


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """A library that was built without the pool's, as every kernel is."""
    path, source = tmp_path_factory.mktemp("pieces") / "pieces.so", Path(__file__).with_name("pieces.cpp")
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fopenmp")
    subprocess.run(["g++", *flags, f"-I{CSRC}", source, "-o", path], check=True)
    library = CDLL(str(path))
    library.count_pieces.argtypes = library.count_nested.argtypes = [c_int64, c_int32, POINTER(c_int64)]
    library.count_ranges.argtypes = [c_int64, c_int64, c_int32, POINTER(c_int64)]
    return library


@pytest.fixture(params=["OpenMP", "pool that sleeps", "pool that spins"])
def waiting(request: pytest.FixtureRequest) -> Iterator[None]:
    load_pool().set_waiting(request.param == "OpenMP", 10_000_000 if "spins" in request.param else 0)
    yield
    threads.share_cores(False, MANY)


@pytest.fixture
def pooled() -> Iterator[None]:
    threads.share_cores(True, MANY)
    yield
    threads.share_cores(False, MANY)


def counted(call, size: int, *arguments: int) -> list[int]:
    counts = np.zeros(size, dtype=np.int64)
    call(*arguments, counts.ctypes.data_as(POINTER(c_int64)))
    return counts.tolist()


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_piece_is_computed_once(pieces: CDLL, num_threads: int) -> None:
    for size in (0, 1, 2, 3, 40, 1000):
        for _ in range(20):
            assert counted(pieces.count_pieces, size, size, num_threads) == [1] * size
            assert counted(pieces.count_ranges, size, size, 1, num_threads) == [1] * size
            assert counted(pieces.count_ranges, size, size, 7, num_threads) == [1] * size


@pytest.mark.usefixtures("pooled")
def test_calls_of_several_threads_and_calls_within_calls(pieces: CDLL) -> None:
    found: list[list[int]] = []

    def call() -> None:
        for _ in range(50):
            found.append(counted(pieces.count_pieces, 100, 100, 3))
            found.append(counted(pieces.count_nested, 100, 10, 3))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [[1] * 100] * 400


@pytest.mark.usefixtures("pooled")
def test_another_library_sets_the_threads_of_this_one(pieces: CDLL) -> None:
    """Libraries of kernels are built separately and share one pool."""
    assert pieces.threads_that_meet(2) == 2
    names = {(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()}
    assert "kernels-1" in names


@pytest.mark.usefixtures("pooled")
def test_a_forked_process_computes_alone(pieces: CDLL) -> None:
    assert counted(pieces.count_pieces, 50, 50, 2) == [1] * 50
    pid = os.fork()
    if pid == 0:
        os._exit(0 if counted(pieces.count_pieces, 50, 50, 2) == [1] * 50 else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.usefixtures("pooled")
def test_at_most_so_many_threads_compute(pieces: CDLL) -> None:
    """With one, a piece that waits for the next one to begin would never end: here each is computed alone."""
    load_pool().set_most_threads(1)
    before = len(list(Path("/proc/self/task").iterdir()))
    assert counted(pieces.count_pieces, 50, 50, 64) == [1] * 50
    assert len(list(Path("/proc/self/task").iterdir())) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_other_threads_keep_off_the_callers_core_until_they_may_use_it_again(pieces: CDLL) -> None:
    pool, cpus = load_pool(), os.sched_getaffinity(0)
    counted(pieces.count_pieces, 2, 2, 2)  # the threads are known from here on
    pool.keep_apart(True)
    kept_off = [core for core in cpus if not pieces.second_may_use(core)]
    pool.keep_apart(False)
    assert len(kept_off) == 1, "the core on which the caller was"
    assert all(pieces.second_may_use(core) for core in cpus)
