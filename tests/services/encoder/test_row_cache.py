"""Which rows stay, and what becomes of a computation that fails."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.loop_clock import settle
from tokenloom.request.errors import NotFound
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.encoder.row_maker import Rows
from tokenloom.v1.encoder_pb2 import RowType


def making(size: int) -> Callable[[], Coroutine[Any, Any, Rows]]:
    async def make() -> Rows:
        return Rows(bytes(size), 1, size, RowType.ROW_TYPE_BFLOAT16)

    return make


async def test_the_longest_unused_rows_go_first() -> None:
    cache = RowCache(100)
    for key in (b"a", b"b"):
        await cache.get(key, making(40))
    await cache.get(b"a", making(40))
    await cache.get(b"c", making(40))
    assert (cache.num_bytes, cache.num_computed, cache.num_found) == (80, 3, 1)
    await cache.get(b"b", making(40))
    assert cache.num_computed == 4


async def test_rows_that_never_fit_are_given_out_and_not_kept() -> None:
    cache = RowCache(100)
    await cache.get(b"a", making(40))
    assert len((await cache.get(b"large", making(101))).data) == 101
    assert cache.num_bytes == 40


async def test_a_failure_is_that_of_all_who_wait_and_of_no_one_later() -> None:
    cache, fails = RowCache(100), asyncio.Event()

    async def fail() -> Rows:
        await fails.wait()
        raise NotFound("gone")

    calls = [asyncio.create_task(cache.get(b"a", fail)) for _ in range(3)]
    await settle()
    fails.set()
    for call in calls:
        with pytest.raises(NotFound):
            await call
    assert len((await cache.get(b"a", making(40))).data) == 40
    assert (cache.num_computed, cache.num_joined) == (2, 2)


async def test_a_call_that_comes_as_the_last_one_is_cancelled_begins_anew() -> None:
    cache, begun = RowCache(100), asyncio.Event()

    async def hang() -> Rows:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    call = asyncio.create_task(cache.get(b"a", hang))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len((await cache.get(b"a", making(40))).data) == 40
    await cache.close()
