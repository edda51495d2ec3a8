"""The store keeps what fits, tenant by tenant."""

import pytest

from tokenloom.request import errors
from tokenloom.services.gateway.responses.response_store import MAX_RUNNING, ResponseStore, StoredResponse


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


def test_a_response_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(50)
    store.put(stored("r", "a"))
    with pytest.raises(errors.NotFound):
        store.get("r", "a")


def test_running_responses_are_bounded() -> None:
    store = ResponseStore(1000)
    for number in range(MAX_RUNNING):
        store.begin(stored(f"r{number}", "a"))
    with pytest.raises(errors.ResourceExhausted):
        store.begin(stored("one more", "b"))
    store.delete("r0", "a")
    store.begin(stored("one more", "b"))


def test_a_deleted_response_does_not_come_back() -> None:
    store = ResponseStore(1000)
    store.begin(stored("r", "a"))
    store.delete("r", "a")
    store.end("r", {"id": "r"})
    with pytest.raises(errors.NotFound):
        store.get("r", "a")
