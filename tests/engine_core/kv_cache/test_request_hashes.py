"""Hashes are those of the blocks' content, whatever request came before."""

import numpy as np
import pytest

from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.request import RequestKV
from tokenloom.engine_core.kv_cache.block_pool import RequestHasher
from tokenloom.request import prefix_schedule
from tokenloom.request.prefix_schedule import block_hashes

SIZE = 4
PREFIX = list(range(100, 112))


def request(prompt: list[int], salt: bytes = b"") -> RequestKV:
    return RequestKV("r", list(prompt), salt)


def hash_all(hasher: RequestHasher, wanted: RequestKV) -> list[bytes]:
    while len(wanted.block_hashes) < wanted.num_tokens // SIZE:
        hasher.add_next(wanted)
    return wanted.block_hashes


@pytest.mark.parametrize(
    "prompts",
    [
        [PREFIX, PREFIX],
        [[*PREFIX, 1, 2, 3], [*PREFIX, 1, 2, 3, 4]],
        [[*PREFIX, 1, 2, 3, 4], [*PREFIX, 1, 2], [*PREFIX, 1, 2, 3, 4, 5, 6, 7, 8]],
        [PREFIX, [1, *PREFIX], PREFIX[:7], PREFIX[:8]],
    ],
)
def test_hashes_are_those_of_the_content(prompts: list[list[int]]) -> None:
    hasher = RequestHasher(SIZE, b"seed")
    for prompt in prompts:
        assert hash_all(hasher, request(prompt)) == block_hashes(prompt, SIZE, b"seed")


def test_other_salts_share_nothing() -> None:
    hasher = RequestHasher(SIZE, b"")
    for salt in (b"one", b"two", b"two"):
        assert hash_all(hasher, request(PREFIX, salt)) == block_hashes(PREFIX, SIZE, b"", salt)


def test_the_output_of_the_request_before_counts() -> None:
    hasher, before = RequestHasher(SIZE, b""), request(PREFIX)
    hash_all(hasher, before)
    for token_id in range(8):
        before.all_token_ids.append(token_id)
    hash_all(hasher, before)
    after = request([*PREFIX, 0, 1, 2, 3, 9, 9, 9, 9])
    assert hash_all(hasher, after) == block_hashes(after.all_token_ids, SIZE)


def test_shared_blocks_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def count(parent: bytes, token_ids: list[int], salt: bytes) -> bytes:
        hashed.append(token_ids)
        return prefix_schedule.hash_block(parent, token_ids, salt)

    monkeypatch.setattr("tokenloom.engine_core.kv_cache.block_pool.hash_block", count)
    hasher = RequestHasher(SIZE, b"")
    for last in range(5):
        hash_all(hasher, request([*PREFIX, last, last, last, last]))
    assert len(hashed) == 4 + 4


def test_embeddings_are_never_taken_for_tokens() -> None:
    """Their ids are 0, as those of a prompt may be."""
    hasher, zeros = RequestHasher(SIZE, b""), [0] * 8
    first, second = (hash_all(hasher, with_rows(zeros, value)) for value in (1.0, 2.0))
    plain = hash_all(hasher, request(zeros))
    assert len({first[0], second[0], plain[0]}) == 3
    assert plain == block_hashes(zeros, SIZE)


def test_images_are_named_by_their_keys() -> None:
    hasher, ids = RequestHasher(SIZE, b""), [7] * 12
    requests = [request(ids) for _ in range(3)]
    for each, key in zip(requests, (b"one", b"two", b"one"), strict=True):
        each.media = [MediaSpan(4, 4, 0, key, 4)]
    first, second, third = (hash_all(hasher, each) for each in requests)
    assert first == third == block_hashes(ids, SIZE, media=requests[0].media)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, False, False]
    assert hash_all(hasher, request(ids)) == block_hashes(ids, SIZE)


def with_rows(prompt: list[int], value: float) -> RequestKV:
    wanted = request(prompt)
    wanted.prompt_embeds = [EmbedsSpan(0, np.full((4, 2), value, dtype=np.float32))]
    return wanted


def test_a_long_prompt_is_hashed_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def count(token_ids: list[int], *rest: object) -> list[bytes]:
        rows.append(len(token_ids) // SIZE)
        return block_hashes(token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("tokenloom.engine_core.kv_cache.block_pool.block_hashes", count)
    monkeypatch.setattr("tokenloom.engine_core.kv_cache.block_pool._HASHED_AT_ONCE", 40)
    ids = list(range(150 * SIZE + 3))
    wanted = request(ids, b"salt")
    assert hash_all(RequestHasher(SIZE, b"seed"), wanted) == block_hashes(ids, SIZE, b"seed", b"salt")
    assert rows == [16, 32, 40, 40, 6]
    for token_id in range(3 * SIZE):  # tokens that are decoded fill one block after the other
        wanted.all_token_ids.append(token_id)
        hash_all(RequestHasher(SIZE, b"seed"), wanted)
    assert len(rows) == 5
    assert wanted.block_hashes == block_hashes(wanted.all_token_ids, SIZE, b"seed", b"salt")
