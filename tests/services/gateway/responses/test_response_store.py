"""The store keeps what fits, tenant by tenant."""

import asyncio

import pytest

from tokenloom.request import errors
from tokenloom.services.gateway.responses import response_store
from tokenloom.services.gateway.responses.response_store import (
    EVENTS_PER_BLOCK,
    MAX_RUNNING,
    EventLog,
    ResponseStore,
    StoredResponse,
)

OBJECT_BYTES = response_store.OBJECT_BYTES


@pytest.fixture(autouse=True)
def json_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "OBJECT_BYTES", 0)


def stored(name: str, tenant: str) -> StoredResponse:
    return StoredResponse(tenant, {"id": name, "text": "x" * 100}, [])


def test_a_tenant_drops_only_its_own_responses() -> None:
    store = ResponseStore(1000)
    store.put(stored("theirs", "quiet"))
    for number in range(50):
        store.put(stored(f"r{number}", "busy"))
    assert store.get("theirs", "quiet").tenant == "quiet"
    assert store.get("r49", "busy").tenant == "busy"
    with pytest.raises(errors.NotFound):
        store.get("r0", "busy")


def test_small_objects_count_with_what_python_takes_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "OBJECT_BYTES", OBJECT_BYTES)
    store = ResponseStore(10_000)
    for number in range(1000):
        store.put(StoredResponse("a", {"id": f"conv_{number}"}, [{}]))
    kept = [number for number in range(1000) if is_stored(store, f"conv_{number}")]
    assert kept == list(range(991, 1000))


def is_stored(store: ResponseStore, name: str) -> bool:
    try:
        return bool(store.get(name, "a"))
    except errors.NotFound:
        return False


def test_a_response_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(50)
    store.put(stored("r", "a"))
    with pytest.raises(errors.NotFound):
        store.get("r", "a")


def test_running_responses_are_bounded() -> None:
    store = ResponseStore(1000, is_shared=False)
    for number in range(MAX_RUNNING):
        store.begin(stored(f"r{number}", "a"))
    with pytest.raises(errors.ResourceExhausted):
        store.begin(stored("one more", "a"))
    store.delete("r0", "a")
    store.begin(stored("one more", "a"))


def test_no_tenant_refuses_the_responses_of_others() -> None:
    store = ResponseStore(1000)
    taken = MAX_RUNNING // 2
    for number in range(taken):
        store.begin(stored(f"a{number}", "a"))
    with pytest.raises(errors.ResourceExhausted, match=f"{taken} responses run in the background, {taken} of them"):
        store.begin(stored("one more", "a"))
    for number in range(MAX_RUNNING // 4):
        store.begin(stored(f"b{number}", "b"))
    store.begin(stored("c", "c"))
    for number in range(taken):
        store.end(f"a{number}", {"id": f"a{number}"})
    store.begin(stored("a", "a"))


def test_the_conversations_of_running_responses_are_bounded_too() -> None:
    store = ResponseStore(1000)
    turns = [{"role": "user", "content": "x" * 350}]
    store.put(stored("old", "b"))
    store.begin(StoredResponse("a", {"id": "a0"}, turns))
    with pytest.raises(errors.ResourceExhausted, match="too many bytes"):
        store.begin(StoredResponse("a", {"id": "a1"}, turns))
    assert store.get("old", "b").tenant == "b"
    for number in range(6):
        store.put(stored(f"b{number}", "b"))
    with pytest.raises(errors.NotFound):
        store.get("old", "b")
    store.delete("a0", "a")
    store.begin(StoredResponse("a", {"id": "a1"}, turns))
    store.delete("a1", "a")
    for number in range(4):
        store.delete(f"b{number + 2}", "b")
    store.begin(StoredResponse("a", {"id": "a large one runs alone"}, [{"content": "x" * 2000}]))


def test_a_response_that_is_put_again_counts_once() -> None:
    store = ResponseStore(1000)
    for _ in range(50):
        store.put(stored("r", "a"))
    store.put(stored("s", "a"))
    assert store.get("r", "a").response["id"] == "r"


def test_a_deleted_response_does_not_come_back() -> None:
    store = ResponseStore(1000)
    store.begin(stored("r", "a"))
    store.delete("r", "a")
    store.end("r", {"id": "r"})
    with pytest.raises(errors.NotFound):
        store.get("r", "a")


def event(number: int) -> bytes:
    return b"event: e\ndata: %d\n\n" % number


@pytest.mark.parametrize("num_events", [0, 1, EVENTS_PER_BLOCK - 1, EVENTS_PER_BLOCK, 3 * EVENTS_PER_BLOCK + 5])
def test_events_are_read_from_any_number_on(num_events: int) -> None:
    log = EventLog()
    for number in range(num_events):
        log.add(event(number))
    for first in range(num_events + 2):
        events: list[bytes] = []
        while more := log.read(first + len(events)):
            events += more
        assert events == [event(number) for number in range(first, num_events)]


def test_full_blocks_of_events_are_compressed() -> None:
    log, num_events = EventLog(), 20 * EVENTS_PER_BLOCK
    log.add(b"".join(event(number) for number in range(num_events)))
    assert 0 < log.num_bytes < sum(len(event(number)) for number in range(num_events)) / 3


async def test_a_reader_waits_for_more_events() -> None:
    log = EventLog()
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(log.more()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(reader.done() for reader in readers)
        log.add(event(0))
    log.end(errors.Aborted("It goes on elsewhere."))
    log.end()
    await log.more()  # it is over
    log.add(event(1))
    assert (log.read(0), str(log.error)) == ([event(0)], "It goes on elsewhere.")


def test_the_events_of_responses_count_among_the_bytes() -> None:
    store = ResponseStore(1000, is_shared=False)
    store.put(stored("old", "a"))
    running = stored("new", "a")
    running.log = EventLog()
    store.begin(running)
    running.log.add(b"".join(event(number) for number in range(60)))  # not compressed yet
    store.put(stored("third", "a"))
    assert [is_stored(store, name) for name in ("old", "third", "new")] == [False, False, True]
