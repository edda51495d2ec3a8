"""A bound on live requests, and an end to taking them."""

import asyncio

import pytest

from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.services.output_processor.request_slots import Admission


async def test_the_bound_is_told_as_retryable_and_leaving_makes_room() -> None:
    admission = Admission(1)
    assert admission.has_room()
    assert not admission.has_room(2)
    admission.enter()
    assert not admission.has_room()
    with pytest.raises(ResourceExhausted) as failure:
        admission.enter()
    assert failure.value.retry_after is not None
    admission.leave()
    admission.enter()
    assert admission.num_live == 1


async def test_draining_takes_nothing_new_and_waits_for_the_live() -> None:
    admission = Admission(4)
    admission.enter()
    drained = asyncio.create_task(admission.drain())
    await asyncio.sleep(0)
    assert not admission.has_room()
    with pytest.raises(Unavailable):
        admission.enter()
    assert not drained.done()
    admission.leave()
    await asyncio.wait_for(drained, 30)


async def test_draining_with_nothing_live_is_done() -> None:
    await asyncio.wait_for(Admission(4).drain(), 30)
