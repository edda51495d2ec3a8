"""Merging what waits, and never losing or doubling a token."""

import asyncio
from typing import Any

import pytest

from tokenloom.request import errors, wire_errors
from tokenloom.services.gateway.mesh.collector import Collector, Delta
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1 import types_pb2
from tokenloom.v1.output_processor_pb2 import RequestFinished


def finished(num_tokens: int) -> RequestFinished:
    return RequestFinished(reason=types_pb2.FINISH_REASON_STOP, completion_tokens=num_tokens)


async def test_pending_output_is_merged_by_index() -> None:
    collector = Collector(2)
    collector.put(0, "a", 0, [1])
    collector.put(1, "x", 0, [7])
    collector.put(0, "b", 1, [2, 3])
    assert await collector.take() == [Delta(0, 0, "ab", [1, 2, 3]), Delta(1, 0, "x", [7])]
    collector.put(0, "c", 3, [4])
    collector.finish(0, finished(4))
    assert await collector.take() == [Delta(0, 3, "c", [4], finished(4))]
    assert not collector.done
    collector.finish(1, finished(1))
    assert not collector.done, "the end of index 1 is not taken yet"
    assert await collector.take() == [Delta(1, 1, "", [], finished(1))]
    assert collector.done


async def test_take_waits() -> None:
    collector = Collector(1)
    taken = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    assert not taken.done()
    collector.put(0, "a", 0, [1])
    assert await taken == [Delta(0, 0, "a", [1])]


async def test_a_cancelled_take_loses_nothing() -> None:
    collector = Collector(1)
    taken = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    taken.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taken
    collector.put(0, "a", 0, [1])
    assert await collector.take() == [Delta(0, 0, "a", [1])]


@pytest.mark.parametrize("index", [0, 2], ids=["doubled", "missing"])
async def test_a_wrong_token_index_is_an_error(index: int) -> None:
    collector = Collector(1)
    collector.put(0, "a", 0, [1])
    with pytest.raises(WrongFrame):
        collector.put(0, "b", index, [2])


async def test_a_lost_tail_is_an_error() -> None:
    collector = Collector(1)
    collector.put(0, "a", 0, [1])
    with pytest.raises(WrongFrame):
        collector.finish(0, finished(2))


@pytest.mark.parametrize("reason", [0, 4, 6, 7, 99])
async def test_an_end_for_no_reason_is_an_error(reason: Any) -> None:
    """An error without an error, a reason of engines, one that gateways find themselves, and one that there is not."""
    collector = Collector(1)
    with pytest.raises(WrongFrame, match="no reason to finish"):
        collector.finish(0, RequestFinished(reason=reason))
    assert not collector.done


async def test_one_error_ends_all_and_the_first_stays() -> None:
    collector = Collector(2)
    taken = asyncio.create_task(collector.take())
    await asyncio.sleep(0)
    error = wire_errors.to_proto(errors.Unavailable("gone"))
    collector.finish(1, RequestFinished(reason=types_pb2.FINISH_REASON_ERROR, error=error))
    collector.fail(errors.Internal())
    with pytest.raises(errors.Unavailable, match="gone"):
        await taken


async def test_an_outlet_takes_output_while_the_reader_waits() -> None:
    collector, poured = Collector(1), list[Delta]()

    def outlet(delta: Delta) -> bool:
        poured.append(delta)
        return True

    collector.put(0, "a", 0, [1])
    assert await collector.take(outlet) == [Delta(0, 0, "a", [1])], "what came before is the reader's"
    taken = asyncio.create_task(collector.take(outlet))
    await asyncio.sleep(0)
    collector.put(0, "b", 1, [2])
    assert not taken.done()
    assert poured == [Delta(0, 1, "b", [2])]
    collector.put(0, "c", 2, [3], ends=True)
    collector.finish(0, finished(3))
    assert await taken == [Delta(0, 2, "c", [3], finished(3))], "the end is the reader's, with its last tokens"
    assert collector.done
    assert len(poured) == 1


async def test_refused_output_is_kept_with_all_that_follows() -> None:
    collector, asked = Collector(2), list[Delta]()

    def outlet(delta: Delta) -> bool:
        asked.append(delta)
        return False

    taken = asyncio.create_task(collector.take(outlet))
    await asyncio.sleep(0)
    collector.put(0, "a", 0, [1])
    collector.put(1, "x", 0, [7])
    collector.put(0, "b", 1, [2])
    assert await taken == [Delta(0, 0, "ab", [1, 2]), Delta(1, 0, "x", [7])]
    assert len(asked) == 1, "nothing overtakes what waits"


async def test_an_outlet_that_fails_is_the_requests_error() -> None:
    def outlet(_: Delta) -> bool:
        raise RuntimeError("a bug")

    collector = Collector(1)
    taken = asyncio.create_task(collector.take(outlet))
    await asyncio.sleep(0)
    collector.put(0, "a", 0, [1])
    with pytest.raises(errors.Internal):
        await taken
