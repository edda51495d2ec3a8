from tokenloom.services.engine.kv.kv_paths import RETRY_SECONDS, KVPaths
from tokenloom.services.engine.kv.kv_peers import Owner

HERE, THERE = Owner("a", 1, "unix:/a", "host"), Owner("b", 1, "b:1", "another")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_memory_is_shared_on_one_host_only() -> None:
    paths = KVPaths(["shm", "nixl", "socket"], "host")
    assert paths.to(HERE) == ["shm", "nixl", "socket"]
    assert paths.to(THERE) == ["nixl", "socket"]


def test_what_failed_is_avoided_for_a_while_for_that_engine_in_that_life() -> None:
    clock = Clock()
    paths = KVPaths(["shm", "socket"], "host", clock)
    paths.note_failure(HERE, "shm")
    assert paths.to(HERE) == ["socket"]
    assert paths.to(Owner("a", 2, "unix:/a", "host")) == ["shm", "socket"]
    assert paths.to(Owner("c", 1, "unix:/c", "host")) == ["shm", "socket"]
    clock.now += RETRY_SECONDS
    assert paths.to(HERE) == ["shm", "socket"]


def test_where_nothing_is_left_all_are_tried() -> None:
    paths = KVPaths(["shm", "socket"], "host")
    paths.note_failure(HERE, "shm")
    paths.note_failure(HERE, "socket")
    assert paths.to(HERE) == ["shm", "socket"]


def test_what_is_past_is_forgotten() -> None:
    clock = Clock()
    paths = KVPaths(["shm"], "host", clock)
    for epoch in range(100):
        paths.note_failure(Owner("a", epoch, "", "host"), "shm")
        clock.now += RETRY_SECONDS / 2
    assert len(paths._failed) <= 2
