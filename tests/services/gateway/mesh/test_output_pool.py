"""What a pool does: it keeps its links, bounds what waits, counts, and seeks requests that are to be resumed."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import SOON
from tokenloom.request import wire_errors
from tokenloom.request.errors import Internal, RequestLost, Unavailable
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.output_pool import (
    MAX_WITHDRAWN,
    RETRY_SECONDS,
    SEARCH_SECONDS,
    SILENT_SECONDS,
    UNSETTLED_SECONDS,
    OutputPool,
)
from tokenloom.services.gateway.mesh.process_stream import OutputLink, ProcessStream
from tokenloom.services.runtime.peers import retry_budget
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.v1.output_processor_pb2 import (
    ProcessFrame,
    RecallRequest,
    RecallResponse,
    RequestFinished,
    Submit,
)
from tokenloom.v1.types_pb2 import Hello, Prompt

REQUEST_ID = "ab" * 20


class Channels:
    """Opens channels that carry nothing, and close when the test says so."""

    def __init__(self) -> None:
        self.num_opened = 0
        self.is_closing, self.may_close = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def open(self, address: str, service: str) -> AsyncIterator[Any]:
        self.num_opened += 1
        try:
            yield self
        finally:
            self.is_closing.set()
            await self.may_close.wait()

    def stream_stream(self, *_: object, **__: object) -> None:
        """Make no call: the test connects the links."""

    unary_unary = stream_stream


async def test_one_that_comes_back_while_its_channel_closes_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    present, connects = {"a"}, asyncio.Event()
    channels = Channels()

    async def connect(link: OutputLink, stub: object) -> None:
        connects.set()
        await asyncio.sleep(0)

    monkeypatch.setattr(OutputLink, "connect", connect)
    members: Any = SimpleNamespace(chosen=present)
    pool = OutputPool(members, "gateway", 1, channels, max_kept_bytes=1, on_moved=lambda: None)  # type: ignore[arg-type]
    link = OutputLink("a", Hello(), pool)
    pool._links.append(link)
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as group:
        keeping = group.create_task(pool._keep(link))
        await connects.wait()
        present.clear()
        await channels.is_closing.wait()
        present.add("a")  # the watch finds a link that it has already
        connects.clear()
        channels.may_close.set()
        await connects.wait()
        assert (channels.num_opened, pool._links) == (2, [link])
        present.clear()
        await keeping
    assert pool._links == []


def a_pool(num_output_processors: int, max_kept_bytes: int = 1) -> OutputPool:
    members = PeerMembers([f"unix:/none/{number}.sock" for number in range(num_output_processors)], size=2)
    pool = OutputPool(members, "gateway", 1, None, max_kept_bytes=max_kept_bytes, on_moved=lambda: None)  # type: ignore[arg-type]
    members.move(ReplicaPosition(0, num_output_processors))
    return pool


async def test_the_withdrawals_that_wait_for_connections_are_bounded() -> None:
    pool = a_pool(8)
    for number in range(MAX_WITHDRAWN + 50):
        pool.withdraw(f"{number:040x}", "a")
    assert len(pool._withdrawn) == MAX_WITHDRAWN
    assert (f"{MAX_WITHDRAWN + 49:040x}", "a") in pool._withdrawn
    pass_time(SEARCH_SECONDS + 1)
    pool.withdraw("f" * 40, "a")
    assert list(pool._withdrawn) == [("f" * 40, "a")], "the others are too old"


async def test_a_withdrawal_that_is_repeated_goes_last() -> None:
    pool = a_pool(8)
    for request_id in ("a", "b"):
        pool.withdraw(request_id * 40, "t")
    pass_time(SEARCH_SECONDS - 1)
    pool.withdraw("a" * 40, "t")
    pass_time(2)
    pool.on_open()
    assert list(pool._withdrawn) == [("a" * 40, "t")]


async def test_a_scrape_counts_while_streams_end() -> None:
    """It runs in a thread of its own: the event loop may drop a stream after the scrape has looked at it once."""

    class Link:
        address = "a"
        is_lost = False

        @property
        def stream(self) -> ProcessStream | None:
            self.is_lost = not self.is_lost
            return ProcessStream(pool) if self.is_lost else None

    members: Any = SimpleNamespace(chosen={"a"})
    pool = OutputPool(members, "gateway", 1, None, max_kept_bytes=1, on_moved=lambda: None)  # type: ignore[arg-type]
    pool._links.append(Link())  # type: ignore[arg-type]
    assert pool.num_connected == 1
    pool._links[:] = [Link()]  # type: ignore[list-item]
    assert pool.num_known == 1


class Search:
    """A request that is to be resumed, and two output processors; the first one is asked first."""

    def __init__(self, max_kept_bytes: int = 1, *, may_begin: bool = False, **fields: Any) -> None:
        """``fields``: more of what would begin it."""
        self.pool = a_pool(2, max_kept_bytes)
        links = [OutputLink(f"unix:{number}", Hello(), self.pool) for number in range(2)]
        for number, link in enumerate(links):
            link.mark = f"{number:08x}"
        self.links = sorted(links, key=lambda link: link.rank(REQUEST_ID))
        self.pool._links = list(links)
        for link in links:
            link.stream, link.changed_at = ProcessStream(self.pool), -math.inf
        self.collector = Collector(1)
        submit = Submit(request_id=REQUEST_ID, tenant="a", **fields)
        self.pool.resume(submit, self.collector, 0, may_begin=may_begin)

    def is_asked(self, number: int) -> bool:
        stream = self.links[number].stream
        return stream is not None and bool(stream.slots)

    async def unknown(self, number: int, *, is_copied: bool = False) -> None:
        stream = self.links[number].stream
        assert stream is not None
        (slot,) = stream.slots
        lost = wire_errors.to_proto(RequestLost("The request is not known."))
        finished = RequestFinished(slot=slot, error=lost, is_copied=is_copied)
        for _ in stream.receive(ProcessFrame(finished=[finished])):
            pass
        await settle()

    def lose(self, number: int) -> None:
        link, stream = self.links[number], self.links[number].stream
        assert stream is not None
        link.stream, link.changed_at = None, asyncio.get_running_loop().time()
        self.pool.on_lost(stream, stream.end())

    def connect(self, number: int) -> None:
        self.links[number].stream = ProcessStream(self.pool)
        self.links[number].changed_at = asyncio.get_running_loop().time()
        self.pool.on_open()


async def test_a_request_is_sought_as_long_as_one_that_was_cut_off_keeps_it() -> None:
    """The loss was found out when the search of 3 s was over: its client got 404 while the request ran."""
    search = Search()
    assert search.is_asked(0)
    pass_time(SEARCH_SECONDS + 1)
    search.lose(0)
    assert search.is_asked(1)
    await search.unknown(1)
    pass_time(SEARCH_SECONDS + 1)
    await settle()
    assert search.is_asked(1), "the gateway that had it may have sent it there meanwhile"
    await search.unknown(1)
    assert not search.collector.failed
    search.connect(0)
    assert search.is_asked(0)


async def test_a_request_is_sought_as_long_as_one_was_not_connected_yet() -> None:
    """A gateway that had just started gave a request up after 3 s, while its first connection to the only output
    processor that had it took longer."""
    search = Search()
    link = OutputLink("unix:2", Hello(), search.pool)
    search.pool._links.append(link)
    for number in range(2):
        await search.unknown(number)
    pass_time(SEARCH_SECONDS + 1)
    await settle()
    assert not search.collector.failed
    for number in range(2):
        await search.unknown(number)
    stream = ProcessStream(search.pool)
    link._greet(stream, ProcessFrame(hello=make_hello("output-2", 1)))
    assert len(stream.slots) == 1, "it is asked at once"
    assert link.changed_at == -math.inf, "nothing was there before"


async def test_a_request_that_was_found_begins_again_when_its_output_processor_is_lost() -> None:
    """It had no token yet, and was sought where it was no more: its client got 404."""
    search = Search(max_kept_bytes=100)
    stream = search.links[0].stream
    assert stream is not None
    (slot,) = stream.slots
    for _ in stream.receive(ProcessFrame(found_slots=[slot, slot + 1])):
        pass
    search.lose(0)
    (request,) = search.pool._waiting
    assert not search.is_asked(1)
    assert request.can_begin


async def test_a_request_that_was_found_is_sought_again_without_its_prompt() -> None:
    search = Search(max_kept_bytes=1, prompt=Prompt(token_ids=[1, 2]))
    stream = search.links[0].stream
    assert stream is not None
    for _ in stream.receive(ProcessFrame(found_slots=list(stream.slots))):
        pass
    search.lose(0)
    assert search.is_asked(1)


async def test_a_request_is_sought_while_a_gateway_that_lives_has_it() -> None:
    """Its output processor had died, and its gateway was starved for longer than the search lasted."""
    search = Search()
    for _ in range(4):
        await search.unknown(0)
        await search.unknown(1, is_copied=True)
        assert not search.collector.failed
        pass_time(SEARCH_SECONDS - 0.1)
        await settle()
    for _ in range(2):
        await search.unknown(0)
        await search.unknown(1)
        pass_time(SEARCH_SECONDS)
        await settle()
    with pytest.raises(RequestLost):
        await search.collector.take()


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_request_that_no_part_has_begins_anew_if_its_client_has_nothing_of_it(is_kept: bool) -> None:
    """Its gateway was killed while no output processor was connected: the client, which knew its id, got 404."""
    search = Search(100 if is_kept else 1, may_begin=True, prompt=Prompt(token_ids=[1, 2]))
    await search.unknown(0)
    await search.unknown(1)
    assert not search.collector.failed
    pass_time(SEARCH_SECONDS)
    await settle()
    await search.unknown(0)
    await search.unknown(1)
    assert search.collector.failed == (not is_kept)
    assert [(request.request_id, request.is_sought) for request in search.pool._waiting] == [
        (REQUEST_ID, False)
    ] * is_kept


class Silences:
    """Requests at the first of two output processors, without a budget for retries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_requests: int, **fields: Any) -> None:
        monkeypatch.setattr(retry_budget, "MAX_RETRIES", 0.0)
        members: Any = SimpleNamespace(chosen={"a", "b"}, widen=lambda: None, is_wide=False)
        self.pool = OutputPool(members, "gateway", 1, None, max_kept_bytes=99, on_moved=lambda: None)  # type: ignore[arg-type]
        self.links = [OutputLink(address, Hello(), self.pool) for address in "ab"]
        self.pool._links.extend(self.links)
        self.connect(0)
        for _ in range(num_requests):
            self.pool.submit(Submit(**fields), Collector(1), 0)
        self.placing = asyncio.create_task(self.pool._place_waiting())

    def connect(self, number: int) -> None:
        link = self.links[number]
        link.stream = ProcessStream(self.pool)
        link.stream.incarnation = link.address, 1
        self.pool.on_open()

    async def lose(self, number: int) -> None:
        stream, self.links[number].stream = self.links[number].stream, None
        assert stream is not None
        stream.was_silent = True
        self.pool.on_lost(stream, stream.end())
        await settle()

    def num_sent(self, number: int) -> int:
        stream = self.links[number].stream
        return 0 if stream is None else len(stream.slots)

    def answer(self, number: int) -> None:
        """Let the request of an output processor have its first token."""
        stream = self.links[number].stream
        assert stream is not None
        (request,) = stream.slots.values()
        request.collector.put(0, "x", 0, [5])


async def test_requests_of_one_that_was_silent_need_no_budget_once_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a whole mesh was starved twice within seconds, ten of them went on at once and then one each second. Calls
    that sought the others got 404."""
    silences = Silences(monkeypatch, 30)
    for _ in range(3):
        await silences.lose(0)
        silences.connect(0)
        await settle()
        assert silences.num_sent(0) == 30
    silences.placing.cancel()


async def test_requests_that_move_on_from_one_that_stays_silent_wait_for_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silences = Silences(monkeypatch, 3)
    await silences.lose(0)
    silences.connect(1)
    await settle()
    assert silences.num_sent(1) == 3, "the first retry is free"
    await silences.lose(1)
    silences.connect(0)
    await settle()
    assert silences.num_sent(0) == 0, "the other one may compute them"
    silences.connect(1)
    await settle()
    assert silences.num_sent(0) + silences.num_sent(1) == 3
    silences.placing.cancel()


def moved(link: OutputLink) -> list[str]:
    """Return what an output processor is to end, because another one runs it now."""
    assert link.stream is not None
    return [each.request_id for message in link.stream._outbox for each in message.moved]


async def test_an_output_processor_that_is_back_ends_what_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computed that for 5 s more, and a call at another gateway found it there: one request ran twice."""
    silences = Silences(monkeypatch, 1, request_id="a", fingerprint=b"body", prompt=Prompt(token_ids=[1]))
    silences.connect(1)
    await silences.lose(0)
    assert silences.num_sent(1) == 1
    silences.answer(1)
    silences.connect(0)
    assert moved(silences.links[0]) == ["a"]
    await silences.lose(0)
    silences.connect(0)
    assert moved(silences.links[0]) == [], "once"
    silences.placing.cancel()


async def test_what_moves_after_the_return_ends_too_but_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    silences = Silences(monkeypatch, 1, request_id="a", fingerprint=b"body", prompt=Prompt(token_ids=[1]))
    silences.connect(1)
    await silences.lose(0)
    await silences.lose(1)
    silences.connect(1)
    await settle()
    silences.connect(0)
    pass_time(RETRY_SECONDS)
    await settle()
    assert moved(silences.links[0]) == [], "it may never arrive where it was sent, and is not lost then"
    silences.answer(1)
    pass_time(RETRY_SECONDS)
    await settle()
    assert (silences.num_sent(1), moved(silences.links[1])) == (1, [])
    assert moved(silences.links[0]) == ["a"]
    assert not silences.pool._left, "nothing is looked for any more"
    silences.placing.cancel()


async def test_what_no_call_can_resume_has_ended_with_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    silences = Silences(monkeypatch, 1, request_id="a", prompt=Prompt(token_ids=[1]))
    silences.connect(1)
    await silences.lose(0)
    silences.connect(0)
    assert (silences.num_sent(1), moved(silences.links[0])) == (1, [])
    silences.placing.cancel()


async def test_the_search_ends_when_nothing_has_changed_for_a_while() -> None:
    search = Search()
    await search.unknown(0)
    search.lose(1)
    pass_time(UNSETTLED_SECONDS - 1)
    await settle()
    search.connect(1)
    await search.unknown(0)
    assert search.is_asked(1), "it is asked at once"
    await search.unknown(1)
    assert not search.collector.failed
    pass_time(SEARCH_SECONDS + 1)
    await settle()
    for number in range(2):
        await search.unknown(number)
    with pytest.raises(RequestLost):
        await search.collector.take()


async def test_a_call_whose_request_a_later_call_runs_ends_instead_of_being_sent_again() -> None:
    members: Any = SimpleNamespace(chosen={"a"}, widen=lambda: None, is_wide=False)
    pool = OutputPool(members, "gateway", 1, None, max_kept_bytes=1, on_moved=lambda: None)  # type: ignore[arg-type]
    link, collectors = OutputLink("a", Hello(), pool), [Collector(1), Collector(1)]
    for collector in collectors:
        pool.submit(Submit(request_id=REQUEST_ID, take_over=True), collector, 0)  # waits for an output processor
    pool._links.append(link)
    link.stream = ProcessStream(pool)
    collectors[0].is_superseded = True
    placing = asyncio.create_task(pool._place_waiting())
    await settle()
    assert [each.failed for each in collectors] == [True, False]
    assert [request.collector for request in link.stream.slots.values()] == collectors[1:]
    stream, link.stream = link.stream, None
    collectors[1].is_superseded = True
    pool.on_lost(stream, stream.end())
    assert (collectors[1].failed, len(pool._waiting)) == (True, 0)
    placing.cancel()


async def test_a_request_whose_files_cannot_be_restored_because_of_a_bug_ends() -> None:
    pool = a_pool(1)
    ends: list[object] = []

    async def restore() -> None:
        raise ZeroDivisionError

    request: Any = SimpleNamespace(restore=restore, fail=ends.append, is_sought=False, is_over=True)
    pool._wait = lambda request: None  # type: ignore[method-assign]
    await pool._restore(request)
    assert [type(error) for error in ends] == [Internal]


class Recalled:
    """An output processor that is asked for a request: what it has, or the status that it answers with."""

    def __init__(self, *answers: RecallResponse | grpc.StatusCode) -> None:
        self.answers = list(answers)  # the last one again and again

    async def Recall(self, wanted: RecallRequest, timeout: float) -> RecallResponse:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, RecallResponse):
            return answer
        raise grpc.aio.AioRpcError(answer, grpc.aio.Metadata(), grpc.aio.Metadata(), "")


def recalling(*answers: RecallResponse | grpc.StatusCode) -> "tuple[Search, asyncio.Task[RecallResponse]]":
    """Ask for a request of which the first output processor knows nothing."""
    search = Search()
    search.links[0].stub = Recalled(grpc.StatusCode.NOT_FOUND)  # type: ignore[assignment]
    search.links[1].stub = Recalled(*answers)  # type: ignore[assignment]
    return search, asyncio.create_task(search.pool.recall(REQUEST_ID, "a"))


@pytest.mark.parametrize("status", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED])
async def test_what_no_output_processor_knows_is_lost_at_once(status: grpc.StatusCode) -> None:
    _, asking = recalling(status)
    await settle()
    with pytest.raises(RequestLost):
        asking.result()


async def test_one_that_does_not_answer_is_asked_again() -> None:
    """A second without an answer was taken for one: the client of a response that ran got 404."""
    _, asking = recalling(grpc.StatusCode.DEADLINE_EXCEEDED, RecallResponse(recipe=b"r"))
    await settle()
    assert not asking.done()
    pass_time(RETRY_SECONDS)
    await settle()
    assert asking.result().recipe == b"r"


async def test_a_request_may_come_to_one_that_is_back() -> None:
    """Its gateway sends it there, perhaps a moment after this one has asked."""
    search, asking = recalling(RecallResponse(recipe=b"r"))
    search.lose(1)
    stub, search.links[1].stub = search.links[1].stub, search.links[0].stub
    for _ in range(round((SEARCH_SECONDS + 2) / RETRY_SECONDS)):
        await settle()
        pass_time(RETRY_SECONDS)
    search.connect(1)
    for _ in range(2):
        await settle()
        assert not asking.done()
        pass_time(RETRY_SECONDS)
    search.links[1].stub = stub
    await settle()
    assert asking.result().recipe == b"r"


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_request_that_one_without_an_answer_may_have_is_not_lost(is_away: bool) -> None:
    search, asking = recalling(grpc.StatusCode.UNAVAILABLE)
    if is_away:
        search.lose(1)
    for _ in range(round(SILENT_SECONDS / RETRY_SECONDS)):
        await settle()
        assert not asking.done(), "one that was killed may be back soon"
        pass_time(RETRY_SECONDS)
    await settle()
    with pytest.raises(Unavailable, match="retry"):
        asking.result()


async def test_what_was_left_outlives_a_cancelled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    silences = Silences(monkeypatch, 1, request_id="a", fingerprint=b"body", prompt=Prompt(token_ids=[1]))
    silences.connect(1)
    await silences.lose(0)
    silences.connect(0)
    stream = silences.links[1].stream
    assert stream is not None
    (request,) = stream.slots.values()
    silences.pool._cancel(request)
    assert (moved(silences.links[0]), silences.pool._left) == ([], set()), "a call of another gateway may want it"
    silences.placing.cancel()


async def test_what_was_left_stays_where_the_next_one_is_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the gateway alone had the request until it was placed again."""
    silences = Silences(monkeypatch, 1, request_id="a", fingerprint=b"body", prompt=Prompt(token_ids=[1]))
    silences.connect(1)
    await silences.lose(0)
    silences.answer(1)
    await silences.lose(1)
    silences.connect(0)
    assert moved(silences.links[0]) == []
    await settle()
    assert (silences.num_sent(0), moved(silences.links[0])) == (1, [])
    silences.placing.cancel()
