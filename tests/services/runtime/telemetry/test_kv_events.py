"""Tests the reading of batches, as several releases of vLLM publish them."""

import msgspec
import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.telemetry.kv_events import read_batch, short_hash

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, b"ab"],
    "parent_block_hash": None,
    "token_ids": [7, 8],
    "block_size": 1,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def packed(*events: object, **rest: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), *rest.values()])


def test_maps_of_present_releases_with_members_that_are_not_known() -> None:
    more = STORED | {"extra_keys": [None, ["salt"]], "group_idx": 2, "session_id": "s"}
    batch = read_batch(packed(more, {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}, rank=4))
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 4)
    stored, removed = msgspec.to_builtins(batch.events)
    assert (stored["block_hashes"], stored["group_idx"]) == ([1, "YWI="], 2)
    assert removed == {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}


def test_arrays_of_older_releases() -> None:
    old = ["BlockStored", [1], None, [7, 8], 2, None]  # before there was a medium
    batch = read_batch(packed(old, ["BlockRemoved", [1]], ["AllBlocksCleared"]))
    stored, removed, cleared = msgspec.to_builtins(batch.events)
    assert (stored["token_ids"], stored["medium"], removed["medium"]) == ([7, 8], None, None)
    assert cleared == {"type": "AllBlocksCleared"}
    assert batch.data_parallel_rank is None


def test_events_of_other_kinds_are_left_out() -> None:
    assert read_batch(packed({"type": "Other"}, ["Other", 1], 5, [], {})).events == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.5]),
        packed({"type": "BlockStored"}),
        packed(STORED | {"block_hashes": "x"}),
        packed(["BlockRemoved", [1.5]]),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidArgument, match="no batch of KV events"):
        read_batch(payload)


def test_a_short_hash_is_vllms() -> None:
    data = bytes(range(32))
    assert short_hash(data) == int.from_bytes(data, "big") & (1 << 64) - 1
