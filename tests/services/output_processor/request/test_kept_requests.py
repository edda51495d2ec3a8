"""Tests for how long, and how many of them, requests are kept that can be resumed."""

import asyncio
from dataclasses import dataclass, field

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.request import errors
from tokenloom.services.output_processor.request.kept_requests import (
    DRAIN_SECONDS,
    RETURNED_SECONDS,
    CopiedRequests,
    KeptRequests,
    Peer,
    RequestKey,
)
from tokenloom.v1.output_processor_pb2 import CopiedOutput, JournalCopies, Resume, SampleJournal, Submit

SECONDS = 60.0
PEER = "gateway-0", 1


@dataclass(eq=False)
class FakeRequest:
    """A request whose size and end a test chooses."""

    kept: "KeptRequests[FakeRequest]"
    request_id: str = "a"
    tenant: str = "someone"
    fingerprint: bytes = b"body"
    num_samples: int = 1
    num_bytes: int = 100
    is_over: bool = False
    is_complete: bool = False
    can_repeat: bool = True
    is_attached: bool = True
    log: list[str] = field(default_factory=list)

    @property
    def key(self) -> RequestKey:
        return self.tenant, self.request_id

    def end(self, *, complete: bool = True) -> None:
        self.is_over, self.is_complete = True, complete
        self.kept.ended(self)

    def cancel(self) -> None:
        self.log.append("cancelled")
        self.end(complete=False)

    def detach(self) -> None:
        self.is_attached = False


@pytest.fixture
def kept() -> KeptRequests[FakeRequest]:
    return KeptRequests(lambda error: None, SECONDS, 1000)


def begun(
    kept: KeptRequests[FakeRequest], request_id: str = "a", tenant: str = "someone", peer: Peer | None = PEER
) -> FakeRequest:
    request = FakeRequest(kept, request_id, tenant)
    kept.add(request, peer)
    return request


def find(kept: KeptRequests[FakeRequest], request_id: str = "a") -> FakeRequest | None:
    return kept.find(Resume(request_id=request_id, tenant="someone"))


async def test_a_lost_request_is_cancelled_when_its_time_is_over(kept: KeptRequests[FakeRequest]) -> None:
    request = begun(kept)
    assert kept.lose(request, PEER)
    assert not request.is_attached
    pass_time(SECONDS - 1)
    await settle()
    assert find(kept) is request
    pass_time(1.2)
    await settle()
    assert request.log == ["cancelled"]
    assert find(kept) is None
    assert kept.num_lost == 0


async def test_the_time_for_which_the_process_was_stopped_does_not_count(kept: KeptRequests[FakeRequest]) -> None:
    """The call that resumes it waited in the socket, and was read when the request had been cancelled."""
    request = begun(kept)
    kept.lose(request, PEER)
    kept.connect(PEER)
    pass_time(RETURNED_SECONDS + 4)
    await settle()
    assert find(kept) is request
    pass_time(RETURNED_SECONDS + 0.2)
    await settle()
    assert request.log == ["cancelled"]


async def test_a_resumed_request_has_no_limit_but_its_own(kept: KeptRequests[FakeRequest]) -> None:
    request = begun(kept)
    kept.lose(request, PEER)
    kept.attached(request)
    pass_time(2 * SECONDS)
    await settle()
    assert request.log == []
    kept.connect(PEER)
    assert request.log == []


async def test_ended_requests_are_forgotten_in_order(kept: KeptRequests[FakeRequest]) -> None:
    first, second = begun(kept, "first"), begun(kept, "second")
    first.end()
    pass_time(SECONDS / 2)
    second.end()
    pass_time(SECONDS / 2 + 1)
    await settle()
    assert find(kept, "first") is None
    assert find(kept, "second") is second
    pass_time(SECONDS / 2)
    await settle()
    assert find(kept, "second") is None


async def test_an_ended_request_has_its_whole_time_again_when_a_call_resumes_it(
    kept: KeptRequests[FakeRequest],
) -> None:
    """A client that resumed it, and had no time to read it, had the rest of the first minute to come back."""
    first, second, runs = begun(kept, "first"), begun(kept, "second"), begun(kept, "runs")
    first.end()
    second.end()
    pass_time(SECONDS - 10)
    for request in (first, runs):
        kept.prolong(request)
    pass_time(SECONDS - 1)
    await settle()
    assert [find(kept, name) for name in ("first", "second", "runs")] == [first, None, runs]
    pass_time(1.2)
    await settle()
    assert find(kept, "first") is None


async def test_the_bytes_of_ended_requests_are_bounded(kept: KeptRequests[FakeRequest]) -> None:
    requests = [begun(kept, str(number)) for number in range(12)]
    for request in requests:
        request.end()
    assert [find(kept, request.request_id) for request in requests] == [None, None, *requests[2:]]
    large = begun(kept, "large")
    large.num_bytes = 1001
    large.end()
    assert find(kept, "large") is None
    assert find(kept, "11") is requests[11], "what cannot be kept displaces nothing"
    await kept.close()
    assert find(kept, "11") is None


async def test_errors_and_cancelled_requests_are_forgotten_at_once(kept: KeptRequests[FakeRequest]) -> None:
    begun(kept).end(complete=False)
    assert find(kept) is None


@pytest.mark.parametrize("notices_first", [True, False])
async def test_an_incarnation_that_is_back_has_time_to_send_what_it_had(
    kept: KeptRequests[FakeRequest], notices_first: bool
) -> None:
    """It may be starved in between. Cancelled when it connected, its requests were unknown to all until it went on."""
    request, another = begun(kept), begun(kept, "another")
    kept.lose(another, ("gateway-0", 2))
    if notices_first:
        assert kept.lose(request, PEER)
        kept.connect(PEER)
    else:
        kept.connect(PEER)
        assert kept.lose(request, PEER)
    pass_time(RETURNED_SECONDS - 1)
    await settle()
    assert find(kept) is request
    pass_time(1.2)
    await settle()
    assert request.log == ["cancelled"]
    assert find(kept, "another") is another, "it is of another incarnation"


@pytest.mark.parametrize("how", ["waits", "is of another gateway", "has a stream again", "is of another tenant"])
async def test_what_its_gateway_has_sent_elsewhere_ends(kept: KeptRequests[FakeRequest], how: str) -> None:
    """A call at another gateway found it first, and went on with it beside the one that had moved."""
    request = begun(kept, tenant="another" if how == "is of another tenant" else "someone")
    kept.lose(request, ("gateway-1", 1) if how == "is of another gateway" else PEER)
    if how == "has a stream again":
        kept.attached(request)
    kept.connect(PEER)
    kept.moved("a", "someone", PEER)
    assert request.log == ["cancelled"] * (how == "waits")


async def test_a_gateway_that_is_lost_again_has_its_first_time(kept: KeptRequests[FakeRequest]) -> None:
    """Starved, it had connected again, and was killed before it sent anything: its clients had 5 s instead of 60 s."""
    request = begun(kept)
    kept.lose(request, PEER)
    kept.connect(PEER)
    kept.connect(PEER)
    pass_time(1)
    await settle()
    kept.disconnect(PEER)
    kept.disconnect(PEER)
    pass_time(SECONDS - 2)
    await settle()
    assert find(kept) is request
    pass_time(1.2)
    await settle()
    assert request.log == ["cancelled"], "however often it comes and goes"


async def test_a_gateway_that_comes_and_goes_prolongs_nothing_without_end(kept: KeptRequests[FakeRequest]) -> None:
    """What it had lost, and its copies, lived for as long as its link broke every few seconds."""
    copies, outcomes = copies_with_room(4)
    stream, request = object(), begun(kept)
    copies.receive(stream, copy_of("a", "someone"))
    copies.lose(stream, PEER)
    kept.lose(request, PEER)
    for second in range(0, int(SECONDS + RETURNED_SECONDS) + 2, 2):
        assert second > SECONDS or (request.log, copies.num_copies) == ([], 1)
        kept.connect(PEER)
        copies.connect(PEER)
        for _ in range(10):
            pass_time(0.2)
            await settle()
        kept.disconnect(PEER)
        copies.lose(object(), PEER)
    assert (request.log, outcomes) == (["cancelled"], ["expired"])


async def test_what_was_sent_again_before_the_loss_was_noticed_stays_known(kept: KeptRequests[FakeRequest]) -> None:
    """It ran on the new stream of its gateway, and no call found it when the old one had ended."""
    first = begun(kept)
    kept.connect(PEER)
    again = begun(kept)
    assert find(kept) is first
    assert not kept.lose(first, PEER)
    first.cancel()
    assert find(kept) is again
    assert kept.lose(again, ("gateway-0", 2))
    again.cancel()
    assert find(kept) is None


async def test_one_that_was_sent_twice_is_known_until_both_have_ended(kept: KeptRequests[FakeRequest]) -> None:
    first, second, third = begun(kept), begun(kept), begun(kept)
    second.end()
    first.cancel()
    assert find(kept) is third
    third.end()
    assert find(kept) is third, "its output is kept"


async def test_a_request_of_another_tenant_ends_and_hides_none(kept: KeptRequests[FakeRequest]) -> None:
    """A client that names an id may begin a request with it, if it says that it has nothing of the answer."""
    lost, ended, runs = begun(kept), begun(kept, "b"), begun(kept, "c")
    kept.lose(lost, PEER)
    ended.end()
    runs.can_repeat = False
    for request_id in "abc":
        begun(kept, request_id, "another")
        assert not kept.make_way(request_id, "another")
    assert lost.log == []
    assert [find(kept, "a"), find(kept, "b"), kept.any_of("c", "someone")] == [lost, ended, runs]


async def test_one_that_cannot_be_repeated_hides_no_other(kept: KeptRequests[FakeRequest]) -> None:
    """The second of the same key was lost although it ran, because the first had a stream."""
    first = begun(kept)
    first.can_repeat = False
    assert find(kept) is None
    second = begun(kept)
    assert find(kept) is second
    first.cancel()
    assert find(kept) is second


async def test_a_request_submitted_again_takes_the_place_of_one_without_a_stream(
    kept: KeptRequests[FakeRequest],
) -> None:
    lost = begun(kept)
    kept.lose(lost, PEER)
    second = begun(kept)
    assert lost.log == ["cancelled"]
    assert find(kept) is second
    third = begun(kept)
    assert find(kept) is second, "it has a stream"
    third.end()
    assert find(kept) is second
    second.end()
    fourth = begun(kept)
    assert find(kept) is fourth


async def test_a_gateway_takes_nothing_away_that_another_one_has_lost(kept: KeptRequests[FakeRequest]) -> None:
    """A later call had the request through the gateway that was lost. An earlier one, whose gateway had not learned of
    that and sent the request again, ended next, and no part had the request any more."""
    later = begun(kept, peer=("gateway-1", 1))
    kept.lose(later, ("gateway-1", 1))
    earlier = begun(kept)
    assert (later.log, find(kept)) == ([], later)
    earlier.cancel()
    assert find(kept) is later
    kept.attached(later)
    later.can_repeat = False
    kept.lose(later, ("gateway-1", 2))
    last = begun(kept)
    assert (later.log, find(kept)) == (["cancelled"], last)


async def test_what_its_gateway_has_lost_is_kept_beside_that_of_another_one(kept: KeptRequests[FakeRequest]) -> None:
    """The one that was known was of an earlier call, which ended when no client had come back to it."""
    earlier = begun(kept)
    later = begun(kept, peer=("gateway-1", 1))
    assert find(kept) is earlier
    assert kept.lose(later, ("gateway-1", 1))
    assert (find(kept), kept.num_lost) == (later, 1)
    assert not kept.lose(earlier, PEER), "one of them is enough"
    earlier.cancel()
    assert find(kept) is later
    kept.attached(later)
    later.end()
    assert find(kept) is later


async def test_what_is_found_is_the_callers(kept: KeptRequests[FakeRequest]) -> None:
    request = begun(kept)
    for wanted in (Resume(request_id="a"), Resume(request_id="b", tenant="someone")):
        assert kept.find(wanted) is None
    with pytest.raises(errors.BodyChanged):
        kept.find(Resume(request_id="a", tenant="someone", fingerprint=b"else"))
    with pytest.raises(errors.InvalidArgument, match="samples"):
        kept.find(Resume(request_id="a", tenant="someone", num_samples=2))
    request.can_repeat = False
    assert find(kept) is None
    assert kept.unrepeatable(Resume(request_id="a", tenant="someone")) is request
    assert kept.unrepeatable(Resume(request_id="a", tenant="another")) is None
    assert kept.lose(request, PEER), "it can begin anew"


async def test_a_drain_waits_for_a_moment(kept: KeptRequests[FakeRequest]) -> None:
    first = begun(kept, "first")
    kept.lose(first, PEER)
    kept.hurry()
    second = begun(kept, "second")
    kept.lose(second, PEER)
    pass_time(DRAIN_SECONDS + 0.2)
    await asyncio.sleep(0)
    await settle()
    assert (first.log, second.log) == (["cancelled"], ["cancelled"])


async def test_a_request_that_its_client_has_cancelled(kept: KeptRequests[FakeRequest]) -> None:
    live, lost, ended = begun(kept, "live"), begun(kept, "lost"), begun(kept, "ended")
    kept.lose(lost, PEER)
    ended.end()
    for request_id in ("live", "lost", "ended", "unknown"):
        kept.withdraw(request_id, "another tenant")
    assert find(kept, "live") is live
    for request_id in ("live", "lost", "ended", "unknown"):
        kept.withdraw(request_id, "someone")
        assert find(kept, request_id) is None
    assert (live.log, lost.log, ended.log) == (["cancelled"], ["cancelled"], [])
    assert kept.num_lost == 0


async def test_a_cancelled_request_that_was_sent_twice_runs_nowhere(kept: KeptRequests[FakeRequest]) -> None:
    """The second one took the place of the first, and the first ran on without a client."""
    first, second, third = (begun(kept) for _ in range(3))
    kept.withdraw("a", "someone")
    assert [each.log for each in (first, second, third)] == [["cancelled"]] * 3
    assert find(kept) is None


async def test_nothing_is_kept_for_no_time() -> None:
    kept = KeptRequests[FakeRequest](lambda error: None, 0, 1000)
    request = begun(kept)
    assert not kept.lose(request, PEER)
    request.end()
    assert find(kept) is None


COPY_BYTES = 3000
"""Of a copy with a recipe of 900 bytes, about."""


def copies_with_room(num: int) -> tuple[CopiedRequests, list[str]]:
    """Room for so many copies, and what became of those that were not ended."""
    copies, outcomes = CopiedRequests(SECONDS, num * COPY_BYTES), list[str]()
    copies.count = outcomes.append
    return copies, outcomes


def copy_of(request_id: str, tenant: str, number: int = 1, **fields: object) -> JournalCopies:
    submit = Submit(slot=number, request_id=request_id, tenant=tenant, fingerprint=b"body", recipe=bytes(900), **fields)  # type: ignore[arg-type]
    return JournalCopies(begun=[submit])


def found(copies: CopiedRequests, *ids: tuple[str, str]) -> list[str]:
    return [request_id for request_id, tenant in ids if copies.find(request_id, tenant) is not None]


async def test_a_tenant_that_fills_the_room_for_copies_takes_it_from_itself() -> None:
    copies, outcomes = copies_with_room(4)
    stream = object()
    for number, request_id in enumerate(("a", "b", "c", "d", "e", "f")):
        copies.receive(stream, copy_of(request_id, "many", number))
    copies.receive(stream, copy_of("z", "one", 9))
    assert copies.num_bytes <= 4 * COPY_BYTES
    copies.lose(stream, PEER)
    kept = found(copies, *((each, "many") for each in "abcdef"), ("z", "one"))
    assert kept == ["a", "b", "c", "z"], "the newest of the tenant with most are dropped"
    assert outcomes == ["dropped"] * 3
    assert copies.num_copies == 4


async def test_tokens_that_come_later_take_room_too() -> None:
    copies, outcomes = copies_with_room(3)
    stream = object()
    copies.receive(stream, copy_of("a", "someone", 1))
    copies.receive(stream, copy_of("b", "someone", 2))
    news = CopiedOutput(copy=1, journals=[SampleJournal(token_ids=range(1000))])
    copies.receive(stream, JournalCopies(outputs=[news]))
    copies.lose(stream, PEER)
    assert found(copies, ("a", "someone"), ("b", "someone")) == ["a"]
    copies.withdraw("a", "someone")
    assert (copies.num_copies, copies.num_bytes, outcomes) == (0, 0, ["dropped"])


async def test_a_copy_that_ends_with_the_same_message_makes_room() -> None:
    copies, outcomes = copies_with_room(1)
    stream = object()
    copies.receive(stream, copy_of("a", "someone", 1))
    message = copy_of("b", "someone", 2)
    message.ended.append(1)
    copies.receive(stream, message)
    assert (copies.num_copies, outcomes) == (1, [])


async def test_a_copy_whose_number_is_used_again_is_forgotten() -> None:
    """It would stay for ever: neither the end of its request nor that of the stream would name it."""
    copies, _ = copies_with_room(4)
    stream = object()
    copies.receive(stream, copy_of("a", "someone", 1))
    copies.receive(stream, copy_of("b", "someone", 1))
    copies.lose(stream, PEER)
    assert found(copies, ("a", "someone"), ("b", "someone")) == ["b"]
    assert copies.num_copies == 1


async def test_copies_expire_after_the_loss_of_their_gateway() -> None:
    copies, outcomes = copies_with_room(4)
    first, second = object(), object()
    copies.receive(first, copy_of("a", "someone"))
    copies.receive(second, copy_of("b", "someone"))
    pass_time(2 * SECONDS)
    await settle()
    assert copies.num_copies == 2, "as long as their gateways live"
    copies.lose(first, PEER)
    pass_time(SECONDS / 2)
    copies.lose(second, ("gateway-1", 1))
    pass_time(SECONDS / 2 + 0.2)
    await settle()
    assert found(copies, ("a", "someone"), ("b", "someone")) == ["b"]
    pass_time(SECONDS / 2)
    await settle()
    assert (copies.num_copies, copies.num_bytes, outcomes) == (0, 0, ["expired", "expired"])


async def test_copies_of_a_gateway_that_is_back_are_kept_for_a_moment() -> None:
    """It may be killed before it has sent them again: then no other part has its requests."""
    copies, outcomes = copies_with_room(4)
    stream = object()
    copies.receive(stream, copy_of("a", "someone"))
    copies.lose(stream, PEER)
    copies.connect(PEER)
    pass_time(RETURNED_SECONDS - 1)
    await settle()
    assert found(copies, ("a", "someone")) == ["a"]
    pass_time(RETURNED_SECONDS)
    await settle()
    assert found(copies, ("a", "someone")) == ["a"], "this process was stopped, and has not read what came"
    pass_time(RETURNED_SECONDS + 0.2)
    await settle()
    assert (copies.num_copies, outcomes) == (0, ["expired"])


async def test_copies_of_a_gateway_that_is_lost_again_have_their_first_time() -> None:
    """Starved, it had connected again, and was killed before it sent anything: its clients had 5 s instead of 60 s."""
    copies, outcomes = copies_with_room(4)
    stream = object()
    copies.receive(stream, copy_of("a", "someone"))
    copies.lose(stream, PEER)
    for _ in range(2):
        copies.connect(PEER)
        pass_time(1)
        await settle()
        copies.lose(object(), PEER)
    for seconds in (RETURNED_SECONDS - 0.8, SECONDS - RETURNED_SECONDS - 2.2):
        pass_time(seconds)
        await settle()
        assert found(copies, ("a", "someone")) == ["a"]
    pass_time(1.2)
    await settle()
    assert (copies.num_copies, outcomes) == (0, ["expired"]), "however often it comes and goes"


async def test_a_copy_that_its_gateway_has_left_is_kept_for_a_while() -> None:
    copies, outcomes = copies_with_room(4)
    stream = object()
    copies.receive(stream, copy_of("a", "someone"))
    copies.receive(stream, JournalCopies(left=[1, 2]))
    assert found(copies, ("a", "someone")) == ["a"], "although its gateway lives"
    pass_time(SECONDS - 1)
    await settle()
    copies.lose(stream, PEER)
    copies.connect(PEER)
    assert copies.num_copies == 1
    pass_time(1.2)
    await settle()
    assert (copies.num_copies, copies.num_bytes, outcomes) == (0, 0, ["expired"])


async def test_a_copy_keeps_its_deadline() -> None:
    copies, _ = copies_with_room(4)
    stream, begun = object(), copy_of("a", "someone")
    begun.begun[0].timeout.FromSeconds(20)
    copies.receive(stream, begun)
    pass_time(12.5)
    copies.lose(stream, PEER)
    submit = copies.take(Resume(request_id="a", tenant="someone"))
    assert submit is not None
    assert 7 < submit.timeout.ToMilliseconds() / 1000 <= 7.5
