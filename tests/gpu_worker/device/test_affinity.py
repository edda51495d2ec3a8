"""Workers on their own cores."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tokenloom.gpu_worker.device.cpu_watch import bind_to


def affinity_after(*cpus: int) -> set[int]:
    """What a thread, and one that it starts, may use after it was bound."""

    def bind() -> set[int]:
        bind_to(cpus)
        with ThreadPoolExecutor(1) as started:
            assert started.submit(os.sched_getaffinity, 0).result() == os.sched_getaffinity(0)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:  # the thread of the tests stays free
        return pool.submit(bind).result()


def test_a_worker_keeps_to_its_cores() -> None:
    free = os.sched_getaffinity(0)
    assert affinity_after(min(free)) == {min(free)}
    assert affinity_after() == free == os.sched_getaffinity(0)


def test_a_core_that_it_may_not_use() -> None:
    with pytest.raises(ValueError, match="cpus: this process may not use core 1023, only"):
        affinity_after(1023)
