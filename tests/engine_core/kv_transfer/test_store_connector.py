"""Cores over the hash worker that share blocks: wrong bytes anywhere would change tokens."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_request
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.offloading_core import expected, prompt_of
from tests.engine_core.kv_transfer.storing_core import BLOCK_BYTES, BLOCK_SIZE, MemoryStore, StoringCore
from tokenloom.engine_core.kv_transfer import store_connector, store_queue
from tokenloom.engine_core.kv_transfer.block_store import HEAD_BYTES

PROMPT = prompt_of(1, 30)
NUM_BLOCKS = (len(PROMPT) - 1) // BLOCK_SIZE

MakeCore = Callable[..., StoringCore]


@pytest.fixture
def make_core() -> Iterator[MakeCore]:
    made: list[StoringCore] = []

    def make(store: MemoryStore | str, **settings: object) -> StoringCore:
        made.append(StoringCore(store, **{"num_blocks": 20, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for core in made:
        check_idle(core.core.scheduler)
        core.core.shutdown()
        core.core.shutdown()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore({})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_one_engine_computed_another_loads(make_core: MakeCore, store: MemoryStore, executor: str) -> None:
    one, other = make_core(store, executor=executor), make_core(store, executor=executor)
    assert one.run(PROMPT) == [expected(PROMPT)]
    assert one.num_saved == len(store.values) >= NUM_BLOCKS
    assert other.run(PROMPT) == [expected(PROMPT)]
    stats = other.core.scheduler.stats()
    assert stats.kv_blocks_received == NUM_BLOCKS
    assert stats.kv_bytes_received == {"memory": NUM_BLOCKS * BLOCK_BYTES}
    assert stats.kv_recomputes == {}
    assert other.num_saved == 0, "what is there is not written again"


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 29, 32, 33])
def test_prompts_of_all_lengths(make_core: MakeCore, store: MemoryStore, num_tokens: int) -> None:
    prompt = prompt_of(1, num_tokens)
    for _ in range(2):
        core = make_core(store)
        assert core.run(prompt) == [expected(prompt)]
    assert core.num_loaded == (num_tokens - 1) // BLOCK_SIZE


def test_what_was_evicted_comes_back(make_core: MakeCore, store: MemoryStore) -> None:
    core = make_core(store, num_blocks=10)
    for seed in (1, 2, 1):
        assert core.run(prompt_of(seed, 30)) == [expected(prompt_of(seed, 30))]
    assert core.num_loaded >= 5


def test_only_what_the_pool_lacks_is_looked_for(make_core: MakeCore, store: MemoryStore) -> None:
    make_core(store).run(PROMPT)
    core = make_core(store)
    core.run(PROMPT[:17])
    assert core.num_loaded == 4
    core.run(PROMPT)
    assert core.num_loaded == NUM_BLOCKS
    searches = store.num_searches
    core.run(PROMPT)
    assert store.num_searches == searches, "the pool has all"


def test_groups_of_layers(make_core: MakeCore, store: MemoryStore) -> None:
    windows = (None, 8)
    cores = [make_core(store, windows=windows, num_blocks=40) for _ in range(2)]
    for core in cores:
        assert core.run(PROMPT) == [expected(PROMPT)]
    assert 0 < cores[1].num_loaded < 2 * NUM_BLOCKS, "of the window's blocks the last ones only"


def test_tenants_do_not_see_each_other(make_core: MakeCore, store: MemoryStore) -> None:
    make_core(store).run(PROMPT, salt=b"one")
    core = make_core(store)
    core.run(PROMPT, salt=b"other")
    assert core.num_loaded == 0
    core.run(prompt_of(3, 60))  # drives all out of a small pool
    core.run(PROMPT, salt=b"one")
    assert core.num_loaded == NUM_BLOCKS
    names = {hashlib.sha256(each).digest() for each in (b"one", b"other")}
    assert not any(salt in key for key in store.values for salt in (b"one", b"other", *names))


@pytest.mark.parametrize("change", ["weights", "block_hash_seed"])
def test_engines_of_another_identity_do_not_share(make_core: MakeCore, store: MemoryStore, change: str) -> None:
    make_core(store).run(PROMPT)
    num_values = len(store.values)
    other = make_core(store, **{change: b"other"})
    assert other.run(PROMPT) == [expected(PROMPT)]
    assert other.num_loaded == 0
    assert len(store.values) == 2 * num_values


def test_nothing_is_shared_before_the_weights_are_known(
    make_core: MakeCore, store: MemoryStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    core = make_core(store, weights=b"")
    core.run(PROMPT)
    assert (store.num_searches, store.values) == (0, {})
    core.core.scheduler.share_kv(b"known")
    core.run(prompt_of(2, 30))
    assert store.values
    core.core.sleeping.reload_weights(str(tmp_path))
    num_values = len(store.values)
    core.run(prompt_of(3, 30))
    assert len(store.values) == num_values, "new weights, of which nobody has said which they are"


def test_weights_that_change_while_a_search_is_on_its_way(make_core: MakeCore, store: MemoryStore) -> None:
    """The answer names blocks of the old weights."""
    make_core(store, weights=b"old").run(PROMPT)
    core = make_core(store, weights=b"old")
    store.may_answer.clear()
    core.core.add_request(make_request("0", PROMPT, 4))
    core.core.step()
    core.core.scheduler.share_kv(b"new")
    store.may_answer.set()
    while core.core.has_requests():
        core.step()
    assert core.num_loaded == 0


@pytest.mark.parametrize("damage", ["changed", "torn", "of another block", "empty"])
def test_a_wrong_value_costs_a_recompute(make_core: MakeCore, store: MemoryStore, damage: str) -> None:
    make_core(store).run(PROMPT)
    third = list(store.values)[2]
    value = store.values[third]
    store.values[third] = {
        "changed": value[:-1] + bytes((value[-1] ^ 1,)),
        "torn": value[: HEAD_BYTES + 5],
        "of another block": next(iter(store.values.values())),
        "empty": b"",
    }[damage]
    core = make_core(store)
    assert core.run(PROMPT) == [expected(PROMPT)]
    stats = core.core.scheduler.stats()
    assert stats.kv_blocks_received == 2
    assert stats.kv_recomputes == {"checksum": 1}
    core.settle()
    assert store.values[third] == value, "the wrong one was removed, and the right one saved"


def test_a_block_that_leaves_between_search_and_load(make_core: MakeCore, store: MemoryStore) -> None:
    make_core(store).run(PROMPT)
    third = list(store.values)[2]
    core = make_core(store)
    core.core.add_request(make_request("0", PROMPT, 4))
    core.core.step()
    while not core.core.has_work():
        core._news.wait(0.01)
    del store.values[third]
    while core.core.has_requests():
        core.step()
    stats = core.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (2, {"not_found": 1})


def test_an_answer_that_is_old_is_asked_for_again(
    make_core: MakeCore, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_core(store).run(PROMPT)
    monkeypatch.setattr(store_connector, "LEASE_SECONDS", 0.0)
    core = make_core(store)
    core.core.add_request(make_request("0", PROMPT, 4))
    for _ in range(3):
        searches = store.num_searches
        while store.num_searches == searches:
            core.step()
    monkeypatch.undo()
    while core.core.has_requests():
        core.step()
    assert core.num_loaded == NUM_BLOCKS


def test_content_that_proved_wrong_is_removed(make_core: MakeCore, store: MemoryStore) -> None:
    core = make_core(store)
    core.core.add_request(make_request("0", PROMPT, 40))
    for _ in range(4):
        core.step()
    core.settle()
    assert len(store.values) >= NUM_BLOCKS
    core.core.scheduler.kv.pool.forget(core.core.scheduler.requests["0"].kv.block_ids)
    core.core.abort_requests(["0"])
    core.core.step()
    core.settle()
    assert store.values == {}


def test_a_slow_store_holds_up_nobody_else(make_core: MakeCore, store: MemoryStore) -> None:
    core = make_core(store)
    core.run(prompt_of(2, 30))
    store.may_answer.clear()
    core.core.add_request(make_request("waits", PROMPT, 4))
    core.core.add_request(make_request("runs", [5, 6, 7], 4))  # too short to be looked for
    ended = []
    while not ended:
        ended = [output.request_id for output in core.core.step().outputs if output.finish_reason is not None]
    assert ended == ["runs"], "it does not wait behind the other"
    store.may_answer.set()
    while core.core.has_requests():
        core.step()


def test_a_silent_store_costs_its_timeout_once(
    make_core: MakeCore, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_queue, "RETRY_SECONDS", 1000.0)
    monkeypatch.setattr(store_queue, "MOST_RETRY_SECONDS", 1000.0)
    core = make_core(store, timeout=0.05)
    store.may_answer.clear()
    assert core.run(PROMPT, settles=False) == [expected(PROMPT)]
    assert core.connector.queue.is_away
    searches = store.num_searches
    assert core.run(prompt_of(2, 30), settles=False) == [expected(prompt_of(2, 30))]
    assert store.num_searches == searches, "it is left alone"
    store.may_answer.set()


def test_an_aborted_request_waits_for_no_answer(make_core: MakeCore, store: MemoryStore) -> None:
    core = make_core(store)
    store.may_answer.clear()
    core.core.add_request(make_request("0", PROMPT, 4))
    core.core.step()
    core.core.abort_requests(["0"])
    store.may_answer.set()
    while core.core.scheduler._remote._loading:  # type: ignore[union-attr]
        core.step()


def test_blocks_that_leave_before_they_are_saved_are_dropped(make_core: MakeCore, store: MemoryStore) -> None:
    core = make_core(store, num_blocks=10)
    store.may_write.clear()
    prompts = [prompt_of(seed, 30) for seed in range(4)]
    for prompt in prompts:
        assert core.run(prompt, settles=False) == [expected(prompt)]
    store.may_write.set()
    core.settle()
    other = make_core(store)
    for prompt in prompts:
        assert other.run(prompt) == [expected(prompt)]
    assert 0 < core.num_saved < 4 * NUM_BLOCKS


def test_a_folder(make_core: MakeCore, tmp_path: Path) -> None:
    url = (tmp_path / "kv").as_uri()
    for _ in range(2):
        core = make_core(url, store_bytes=1 << 20)
        assert core.run(PROMPT) == [expected(PROMPT)]
    assert core.core.scheduler.stats().kv_bytes_received == {"folder": NUM_BLOCKS * BLOCK_BYTES}


def test_a_store_brings_what_a_file_beside_it_has_in_part(make_core: MakeCore, tmp_path: Path) -> None:
    url, size, offload = (tmp_path / "kv").as_uri(), 1 << 20, tmp_path / "file"
    offload.mkdir()
    make_core(url, store_bytes=size).run(PROMPT)
    core = make_core(url, store_bytes=size, offload=offload)
    core.run(PROMPT[:17])
    others = prompt_of(3, 70)
    core.run(others)  # drives the beginning out of the pool into the file
    assert core.run(PROMPT) == [expected(PROMPT)]
    received = core.core.scheduler.stats().kv_bytes_received
    assert set(received) == {"folder"}
    assert received["folder"] > NUM_BLOCKS * BLOCK_BYTES
    core.run(others)
    before = core.core.scheduler.stats().kv_bytes_received
    assert core.run(PROMPT) == [expected(PROMPT)], "now the file has all that the store has"
    after = core.core.scheduler.stats().kv_bytes_received
    assert after["offload"] > before.get("offload", 0)
    assert after["folder"] == before["folder"]


def test_a_file_that_lost_its_end_is_replaced(make_core: MakeCore, tmp_path: Path) -> None:
    """As a machine that lost its power may leave one."""
    url = (tmp_path / "kv").as_uri()
    make_core(url, store_bytes=1 << 20).run(PROMPT)
    wrong = next((tmp_path / "kv").glob("*.kv"))
    right = wrong.read_bytes()
    os.truncate(wrong, 0)
    core = make_core(url, store_bytes=1 << 20)
    assert core.run(PROMPT) == [expected(PROMPT)]
    assert core.core.scheduler.stats().kv_recomputes == {"checksum": 1}
    assert wrong.read_bytes() == right


def test_steps_look_at_few_of_the_blocks_that_wait_to_be_saved(
    make_core: MakeCore, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is slower than the steps has nearly all of the pool before it."""
    core = make_core(store, num_blocks=100)
    core.run(PROMPT)
    looked_at = []

    class Waiting(dict[int, bytes]):
        def items(self) -> Iterator[tuple[int, bytes]]:  # type: ignore[override]
            for item in super().items():
                looked_at.append(item)
                yield item

    monkeypatch.setattr(core.connector.queue, "save", lambda block: False)
    core.run(*(prompt_of(seed, 30) for seed in range(2, 10)), settles=False)
    [fresh] = core.connector._fresh
    assert len(fresh.contents) > 50
    fresh.contents = Waiting(fresh.contents)
    core.connector._save_fresh(fresh)
    assert len(looked_at) == 1
    monkeypatch.undo()
    core.connector._save_fresh(fresh)
    core.settle()
    assert not fresh.contents
    assert core.num_saved > 8 * NUM_BLOCKS, "none is lost"


def test_a_folder_smaller_than_a_block(make_core: MakeCore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_store: a block takes 84 bytes there, and it holds 50 bytes"):
        make_core(tmp_path.as_uri(), store_bytes=50)
