from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.engine_core.adapter_dirs import make_adapter
from tests.engine_core.executor.ranks import Ranks
from tests.engine_core.helpers import make_config
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.engine_core.data.errors import ExecutorFailedError, RanksDifferError
from tokenloom.engine_core.data.lora import LoraInfo
from tokenloom.engine_core.executor.executor import WorkerAdapters
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker


class Rank(HashWorker):
    """Keeps the digests of adapters, which it reads from ``files`` if they name the path."""

    def __init__(self) -> None:
        super().__init__(replace(make_config(), lora=LoraConfig(enable=True)))
        self.files: dict[str, bytes] = {}
        self.held: set[bytes] = set()

    def load_lora(self, path: str) -> LoraInfo:
        digest = self.files.get(path) or super().load_lora(path).digest
        self.held.add(digest)
        return LoraInfo(digest, 4)

    def drop_lora(self, digest: bytes) -> None:
        self.held.discard(digest)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(Rank(), Rank())


def held(ranks: Ranks) -> list[set[bytes]]:
    return [worker.held for worker in ranks.workers if isinstance(worker, Rank)]


def test_every_rank_keeps_an_adapter_until_it_is_dropped(ranks: Ranks, tmp_path: Path) -> None:
    digest, store = make_adapter(tmp_path), WorkerAdapters(ranks)
    assert store.load(str(tmp_path)).digest == digest
    assert held(ranks) == [{digest}, {digest}]
    store.drop(digest)
    assert held(ranks) == [set(), set()]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ValueError("no such directory on this node"), ValueError),
        (ExecutorFailedError("worker 1: OSError: the disk failed"), RanksDifferError),
    ],
)
def test_a_rank_forgets_what_another_could_not_read(
    ranks: Ranks, tmp_path: Path, failure: Exception, error: type[Exception]
) -> None:
    make_adapter(tmp_path)
    ranks.failures[1, "load_lora"] = failure
    with pytest.raises(error, match=f"worker 1: {str(failure).removeprefix('worker 1: ')}"):
        WorkerAdapters(ranks).load(str(tmp_path))
    assert held(ranks) == [set(), set()]


def test_an_adapter_that_all_ranks_keep_stays_when_reading_it_again_fails(ranks: Ranks, tmp_path: Path) -> None:
    digest, store = make_adapter(tmp_path), WorkerAdapters(ranks)
    store.load(str(tmp_path))
    ranks.failures[1, "load_lora"] = ValueError("no such directory on this node")
    with pytest.raises(ValueError, match="only some workers accept these files"):
        store.load(str(tmp_path))
    assert held(ranks) == [{digest}, {digest}]


def test_ranks_that_read_different_files_forget_them(ranks: Ranks) -> None:
    for index, worker in enumerate(ranks.workers):
        assert isinstance(worker, Rank)
        worker.files["/a"] = bytes([index + 1]) * 32
    with pytest.raises(ValueError, match="the files changed while they were read"):
        WorkerAdapters(ranks).load("/a")
    assert held(ranks) == [set(), set()]


@pytest.mark.parametrize("failure", [ExecutorFailedError("worker 1: the device failed"), KeyError("a bug")])
def test_a_drop_that_fails_on_some_ranks_is_made_again(ranks: Ranks, failure: Exception) -> None:
    store = WorkerAdapters(ranks)
    a, b = load_two(ranks, store)
    ranks.failures[1, "drop_lora"] = failure
    store.drop(a)
    assert held(ranks) == [{b}, {a, b}]
    ranks.failures.clear()
    store.drop(b)
    assert held(ranks) == [set(), set()]


def test_an_adapter_that_was_loaded_again_after_its_drop_has_failed_stays(ranks: Ranks) -> None:
    store = WorkerAdapters(ranks)
    a, b = load_two(ranks, store)
    ranks.failures[1, "drop_lora"] = ExecutorFailedError("worker 1: the device failed")
    store.drop(a)
    ranks.failures.clear()
    store.load("/a")
    store.drop(b)
    assert held(ranks) == [{a}, {a}]


def load_two(ranks: Ranks, store: WorkerAdapters) -> list[bytes]:
    """Load two adapters, and return their digests."""
    for worker in ranks.workers:
        assert isinstance(worker, Rank)
        worker.files = {"/a": b"a" * 32, "/b": b"b" * 32}
    return [store.load(path).digest for path in ("/a", "/b")]
