"""Tests requests whose client can resume them, and whose connection has ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tests.loop_clock import pass_time, settle
from tokenloom.request import errors
from tokenloom.services.gateway.generation.admission import AdmittedCall, RequestAdmission, WaitEstimator
from tokenloom.services.gateway.generation.resumable import ResumableRequests, UnattendedMetrics
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.records.request_ids import ResumeToken
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import TenantShares
from tokenloom.v1 import types_pb2

SECONDS = 15.0


class FakeGeneration:
    """Waits for output until it fails or is done."""

    def __init__(self, request_id: str = "a", fingerprint: bytes = b"body") -> None:
        self.request_id, self.fingerprint = request_id, fingerprint
        self.done, self.takes_over, self.is_superseded, self.is_abandoned = False, True, False, False
        self.ttft_seconds: float | None = None
        self.log: list[str] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(self) -> None:
        await asyncio.shield(self._end)  # a call that is cancelled may be made again

    def finish(self) -> None:
        self.done = True
        self._end.set_result(None)

    def fail(self, error: errors.TokenloomError) -> None:
        self._end.set_exception(error)

    def supersede(self) -> None:
        self.is_superseded = True

    def abandon(self) -> None:
        self.is_abandoned = True

    def leave(self) -> None:
        self.fail(errors.GatewayLeaving("leaving"))

    def close(self) -> None:
        self.log.append("closed")


CLAIM = ResumeToken("a", b"body", takes_over=True)
JOB = GenerateRequest(["text"], "prompt", types_pb2.SamplingParams(), tenant=NO_TENANT)
RESUMED = errors.Aborted("The answer continues in another call.")


class Held:
    """Requests, and what became of those without a client."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._registry = CollectorRegistry()
        self.failures: list[BaseException] = []
        self.requests = ResumableRequests(seconds, UnattendedMetrics(self._registry), self.failures.append)
        shares = TenantShares(TenantLimits(), is_shared=False, max_live=10, max_sessions=1, max_message_bytes=99)
        self.admission = RequestAdmission(shares, WaitEstimator(10.0))

    @property
    def num_places(self) -> int:
        return self.admission.num_live

    def admit(self, request_id: str = "a") -> AdmittedCall:
        """The turn of a call in its request's place, as the generator finds it."""
        before = self.requests.find(replace(CLAIM, request_id=request_id), "someone")
        return AdmittedCall(self.admission.admit(JOB, 60.0)) if before is None else before.succeed()

    def begun(self, request_id: str = "a", admitted: AdmittedCall | None = None) -> tuple[FakeGeneration, ExitStack]:
        generation, held = FakeGeneration(request_id), ExitStack()
        admitted = admitted or self.admit(request_id)
        held.callback(admitted.end)
        self.requests.add(generation, "someone", admitted)
        return generation, held

    def abandoned(self, request_id: str = "a", admitted: AdmittedCall | None = None) -> FakeGeneration:
        generation, held = self.begun(request_id, admitted)
        assert self.requests.abandon(generation, held)
        held.close()
        return generation

    def count(self, outcome: str) -> float:
        name = "tokenloom_gateway_unattended_requests_ended_total"
        return self._registry.get_sample_value(name, {"outcome": outcome}) or 0.0

    @property
    def num_live(self) -> float | None:
        return self._registry.get_sample_value("tokenloom_gateway_unattended_requests")


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    held = Held()
    yield held
    await held.requests.close()
    assert not held.failures
    assert held.num_live == 0


async def test_an_abandoned_request_is_cancelled_when_its_time_is_over(held: Held) -> None:
    generation = held.abandoned()
    assert generation.is_abandoned
    await settle()
    pass_time(SECONDS - 1)
    await settle()
    assert (generation.log, held.num_live, held.num_places) == ([], 1, 1)
    pass_time(1.2)
    await settle()
    assert (generation.log, held.num_places) == (["closed"], 0)
    assert held.count("expired") == 1


async def test_the_time_for_which_the_gateway_was_stopped_does_not_count(held: Held) -> None:
    """The call that resumes it waited in the socket, and was read when the request had been cancelled."""
    generation = held.abandoned()
    await settle()
    pass_time(SECONDS + 6)
    await settle()
    assert generation.log == []
    pass_time(5.2)
    await settle()
    assert (generation.log, held.count("expired")) == (["closed"], 1)


async def test_a_request_that_a_later_call_seeks_does_not_expire(held: Held) -> None:
    """It waited for an output processor, so that the call that resumed it at the same gateway found it nowhere else."""
    first = held.abandoned()
    later, held_by_later = held.begun(admitted=held.admit())
    for _ in range(3):
        await settle()
        pass_time(SECONDS + 0.2)
        await settle()
        assert first.log == []
    held.requests.remove(later)
    held_by_later.close()
    pass_time(SECONDS + 0.2)
    await settle()
    assert (first.log, held.count("expired")) == (["closed"], 1)


@pytest.mark.parametrize("has_later_ended", [True, False])
async def test_a_cancelled_request_ends_at_all_of_its_calls(held: Held, has_later_ended: bool) -> None:
    """A later call had sought it in vain, or still did: the request, which waited at the gateway, began after all."""
    first = held.abandoned()
    later, held_by_later = held.begun(admitted=held.admit())
    if has_later_ended:
        held.requests.remove(later)
        held_by_later.close()
    assert held.requests.cancel("a", "someone")
    await settle()
    assert (first.log, held.count("cancelled")) == (["closed"], 1)
    if not has_later_ended:
        with pytest.raises(errors.Cancelled):
            await later.take()
        held.requests.remove(later)
        held_by_later.close()
    assert not held.requests.cancel("a", "someone")


async def test_a_call_of_another_tenant_hides_no_request(held: Held) -> None:
    """It had named the id. The request's own client got no place, and could not cancel it."""
    first = held.abandoned()
    other, admitted = FakeGeneration(), AdmittedCall(held.admission.admit(JOB, 60.0))
    held.requests.add(other, "another", admitted)
    assert held.requests.find(CLAIM, "someone") is not None
    assert held.requests.cancel("a", "someone")
    await settle()
    assert (first.log, held.count("cancelled")) == (["closed"], 1)
    held.requests.remove(other)
    admitted.end()


@pytest.mark.parametrize("is_of_another", [True, False])
async def test_a_request_expires_beside_a_later_call_that_does_not_need_it(held: Held, is_of_another: bool) -> None:
    """The later call had found what was left of it at another output processor. Both ran until both had ended, in one
    place."""
    first = held.abandoned()
    later, admitted = FakeGeneration(), held.admit()
    held.requests.add(later, "another" if is_of_another else "someone", admitted)
    later.ttft_seconds = None if is_of_another else 0.5
    await settle()
    pass_time(SECONDS + 0.2)
    await settle()
    assert (first.log, held.count("expired")) == (["closed"], 1)
    held.requests.remove(later)
    admitted.end()


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (FakeGeneration.finish, "ended"),
        (FakeGeneration.leave, "left"),
        (lambda generation: generation.fail(RESUMED), "resumed"),
        (lambda generation: generation.fail(errors.EngineKiller("dead")), "failed"),
    ],
)
async def test_its_end_is_counted(held: Held, end: Callable[[FakeGeneration], None], outcome: str) -> None:
    generation = held.abandoned()
    await settle()
    end(generation)
    await settle()
    assert (generation.log, held.num_places) == (["closed"], 0)
    assert (held.count(outcome), held.num_live) == (1, 0)


async def test_the_call_that_resumes_it_gets_its_place(held: Held) -> None:
    first = held.abandoned()
    assert held.requests.find(CLAIM, "another tenant") is None
    admitted = held.admit()
    assert held.num_places == 1
    second, place = held.begun(admitted=admitted)
    first.fail(RESUMED)
    await settle()
    assert (first.log, held.num_places) == (["closed"], 1), "the second one has it"
    held.requests.remove(second)
    place.close()
    assert held.num_places == 0


async def test_a_call_that_fails_before_it_resumes_the_request_gives_the_place_back(held: Held) -> None:
    first = held.abandoned()
    await settle()
    admitted = held.admit()
    admitted.end()
    admitted.end()
    assert (held.num_places, held.count("resumed")) == (1, 0)
    assert held.requests.find(CLAIM, "someone") is not None, "the first one has it again"
    first.finish()
    await settle()
    assert held.num_places == 0


async def test_the_request_ends_while_a_call_is_about_to_resume_it(held: Held) -> None:
    first = held.abandoned()
    await settle()
    admitted = held.admit()
    first.finish()
    await settle()
    assert held.num_places == 1, "the second one has it"
    admitted.end()
    assert held.num_places == 0


async def test_two_calls_that_resume_the_same_request_have_a_place_each(held: Held) -> None:
    first = held.abandoned()
    await settle()
    admitted, other = held.admit(), held.admit()
    assert held.num_places == 2
    other.end()
    assert held.num_places == 1
    admitted.end()
    first.finish()
    await settle()
    assert held.num_places == 0


async def test_a_place_passes_through_several_calls(held: Held) -> None:
    requests = [held.abandoned()]
    await settle()
    for _ in range(3):
        requests.append(held.abandoned(admitted=held.admit()))
        await settle()
        requests[-2].fail(RESUMED)
        await settle()
        assert held.num_places == 1
    last = held.admit()
    requests[-1].finish()
    await settle()
    last.end()
    assert held.num_places == 0


async def test_a_call_with_another_body_leaves_the_request_its_place(held: Held) -> None:
    held.abandoned()
    await settle()
    with pytest.raises(errors.BodyChanged):
        held.requests.find(replace(CLAIM, fingerprint=b"another"), "someone")
    assert held.requests.find(CLAIM, "someone") is not None
    assert held.num_places == 1


async def test_a_request_with_a_client_keeps_its_place(held: Held) -> None:
    _, place = held.begun()
    assert held.requests.find(CLAIM, "someone") is None
    place.close()


async def test_what_a_request_holds_is_given_back_when_the_gateway_ends_at_the_same_moment(held: Held) -> None:
    generation = held.abandoned()
    await held.requests.close()
    assert (generation.log, held.num_places) == (["closed"], 0)


async def test_a_cancelled_request_ends_at_once(held: Held) -> None:
    live, place = held.begun("live")
    generation = held.abandoned()
    await settle()
    assert not held.requests.cancel("a", "another tenant")
    assert not held.requests.cancel("unknown", "someone")
    assert held.requests.cancel("a", "someone")
    assert held.requests.cancel("live", "someone")
    with pytest.raises(errors.Cancelled):
        await live.take()
    place.close()
    await settle()
    assert (generation.log, held.num_places) == (["closed"], 0)
    assert held.count("cancelled") == 1


async def test_the_latest_request_of_an_id_is_known(held: Held) -> None:
    first = held.abandoned()
    second, _ = held.begun()
    first.fail(RESUMED)
    await settle()
    assert held.requests.cancel("a", "someone")
    with pytest.raises(errors.Cancelled):
        await second.take()


async def test_requests_that_are_not_kept() -> None:
    for held in (Held(seconds=0.0), Held()):
        generation, place = held.begun()
        await held.requests.close()
        assert not held.requests.abandon(generation, place)
        held.requests.remove(generation)
        assert not held.requests.cancel("a", "someone")
    assert not Held().requests.abandon(generation, place), "it was never added"


async def test_a_place_is_given_back_past_a_call_that_has_ended(held: Held) -> None:
    first = held.abandoned()
    second = held.abandoned(admitted=held.admit())
    third = held.admit()
    await settle()
    second.fail(errors.RequestLost("lost"))
    await settle()
    third.end()
    assert held.num_places == 1, "the first request still runs"
    first.finish()
    await settle()
    assert held.num_places == 0


async def test_a_call_without_a_client_is_superseded_by_a_repeat_of_its_request_only(held: Held) -> None:
    before = held.abandoned()
    other, _ = held.begun("b")
    resumed = FakeGeneration()
    resumed.takes_over = False
    held.requests.add(resumed, "someone", held.admit())
    assert not before.is_superseded, "a call that only resumes it needs it to run on"
    held.requests.remove(resumed)
    again = held.abandoned("c")
    repeat, repeat_hold = held.begun("c")
    assert (again.is_superseded, before.is_superseded, other.is_superseded) == (True, False, False)
    attended, hold = held.begun("d")
    held.begun("d")
    assert not attended.is_superseded, "its client still reads"
    for each in (before, again):
        each.finish()
    await settle()
    for generation in (other, repeat, attended):
        held.requests.remove(generation)
    repeat_hold.close()
    hold.close()
