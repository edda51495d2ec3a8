"""Spreads requests over the output processors, and moves those whose output processor is lost or leaves."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget
from tokenloom.services.runtime.streams.slotted_stream import ANY_TOKEN, INITIAL_CREDIT
from tokenloom.services.runtime.tasks import is_cancelled
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from ..records.generate_request import RestorableMedia
from .pending_request import PendingRequest, Sink
from .process_stream import UNKNOWN_MARK, OutputLink, ProcessStream, mark_in

if TYPE_CHECKING:
    from .journal_copies import JournalCopies

Cancel: TypeAlias = Callable[[], None]
log = logging.getLogger(__name__)

SEARCH_SECONDS = 3.0
"""How long a request that is to be resumed is sought at least, and again after each loss or return of an output
processor: another gateway may hold it meanwhile, to place it again."""
UNSETTLED_SECONDS = 60.0
"""For so long after an output processor was lost or has returned, a request that may be running already is sought at
all of them: output processors keep requests for as long (``--keep-lost-requests``)."""
MAX_WITHDRAWN = 10_000
"""Requests to be ended at output processors that connect within the time of a search: clients choose their ids, and
may name as many as they like. Beyond it, the oldest ones are ended only where the gateway is connected already."""
RECALL_SECONDS = 1.0
"""How long an output processor may take to say whether it has a request."""
SILENT_SECONDS = 20.0
"""How long a call waits for output processors that may have its request and do not answer: a killed one may take longer
than a search to start again, and clients of plain HTTP do not repeat a call that ends with 503."""
RETRY_SECONDS = 0.5
"""How long an accepted request waits until it asks again, when all are full or the budget of retries is spent."""
_ASK_SECONDS = 0.002
"""Until an output processor is asked again whether it has a request that was just sent to it, and twice as long each
time."""
_PLACED_AT_ONCE = 16
"""Requests that are moved before the event loop serves other work."""


class OutputPool:
    """Sends requests to the output processors that are connected, in turn.

    A request whose output processor is lost, or ends it with ``TryElsewhere``, continues on another one. It waits while
    none is connected; the time limit of the client's request ends the wait. Fulfils ``StreamOwner``.

    Attributes:
        vocab_size: Of the model; higher than any until an engine has said it.
    """

    def __init__(
        self,
        members: PeerMembers,
        peer_id: str,
        epoch: int,
        channels: Channels,
        *,
        max_kept_bytes: int,
        on_moved: Callable[[], object],
        copies_journals: bool = False,
    ) -> None:
        """Args:
        max_kept_bytes: Limits the prompts that are kept for requests in work.
        on_moved: Called for each request that is sent again.
        copies_journals: Keep a copy of each request that can be resumed at a second output processor.
        """
        self.vocab_size = ANY_TOKEN
        self._members = members
        self._peer_id = peer_id
        self._epoch = epoch
        self._channels = channels
        self._kept = AdmissionLimit(max_kept_bytes)
        self._budget = RetryBudget(asyncio.get_running_loop().time)
        self._count_moved = on_moved
        self._copies_journals = copies_journals
        self._copies: JournalCopies | None = None  # once started
        self._links: list[OutputLink] = []  # one for each output processor
        self._turn = 0
        self._has_left = False  # whether any link is left
        self._fall_backs = FallBacks()
        self._waiting: dict[PendingRequest, None] = {}  # in order of arrival; bounded by what the gateway admits
        self._wake = asyncio.Event()
        self._held: dict[PendingRequest, asyncio.TimerHandle] = {}  # until they ask again; bounded by the same
        self._restoring: dict[PendingRequest, asyncio.Task[None]] = {}  # their files; bounded by the same
        self._spawn: Callable[..., asyncio.Task[None]] | None = None
        self._left = set[PendingRequest]()  # that may run where they were lost, too; bounded by the same
        self._left_timer: asyncio.TimerHandle | None = None  # until it is looked whether they have arrived elsewhere
        self._withdrawn: dict[tuple[str, str], float] = {}  # with the time to go, which ascends; bounded
        self._sought: dict[PendingRequest, asyncio.TimerHandle] = {}  # waiting for a connection; bounded by the same

    @property
    def num_connected(self) -> int:
        """Return how many output processors would be sent a new request at once."""
        return len(self._able())

    @property
    def num_known(self) -> int:
        """Return how many output processors should take requests: those that leave are not among them."""
        # The thread of a scrape asks too: each stream is read once, because the event loop may drop it meanwhile.
        leaving = sum((stream := link.stream) is not None and stream.leaving for link in self._links)
        return sum(link.address in self._members.chosen for link in self._links) - leaving

    def replicas(self) -> list[str]:
        """Return whether each output processor is ``serving``, ``draining`` or ``lost``, in the order of their
        addresses."""
        links = sorted(self._links, key=lambda link: link.address)
        return [
            "lost" if link.stream is None else "draining" if link.stream.leaving else "serving"
            for link in links
            if link.address in self._members.chosen or link.stream is not None
        ]

    def start(self, host: Host, fingerprint: types_pb2.Fingerprint) -> None:
        """Connect to all of them, and keep them connected for as long as the host lives."""
        self._fall_backs, self._spawn = host.fall_backs, host.spawn
        ours = hello.make_hello(self._peer_id, self._epoch, fingerprint=fingerprint, initial_credit=INITIAL_CREDIT)

        def joined(address: str) -> None:
            if all(link.address != address for link in self._links):
                link = OutputLink(address, ours, self, lambda: address in self._members.chosen)
                self._links.append(link)
                host.spawn(self._keep(link), name=f"link to output processor {address}")

        if self._copies_journals:
            from .journal_copies import JournalCopies  # here: most gateways keep no copies

            self._copies = JournalCopies(self._links, host.fall_backs, fingerprint.model)
            host.spawn(self._copies.run(), name="copies of requests")
        host.spawn(self._members.watch(joined), name="output processors")
        host.spawn(self._place_waiting(), name="requests without an output processor")

    def submit(self, submit: pb.Submit, collector: Sink, index: int, media: RestorableMedia | None = None) -> Cancel:
        """Send a request to the next output processor in turn, or keep it until one is connected; its samples go to the
        collector, from ``index`` on. ``submit`` must not change any more. ``media``: its images; None: it has none.

        Returns what cancels it, which must be called when the collector's request has ended.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._budget.add_request()
        # It may run where it would not be placed now, because another output processor was away then, or was not among
        # those of the gateway that began it.
        is_sought = submit.take_over and (
            self._connect_all() or any(now - link.changed_at < UNSETTLED_SECONDS for link in self._links)
        )
        # A call with an idempotency key goes where every gateway would place it. Where that output processor was away
        # when the request began, the next gateway began it a second time, and the answer came 7 s late.
        until = now + SEARCH_SECONDS if is_sought else 0.0
        request = PendingRequest(
            submit, collector, index, self._kept, self._budget, now=now, sought_until=until, media=media
        )
        if self._copies is not None:
            self._copies.add(request)
        if is_sought:
            if not request.is_kept:
                loop.call_at(until + SEARCH_SECONDS, request.settle)  # by then it was found, or has begun
            self._seek(request)
        else:
            self._begin(request)
        return partial(self._cancel, request)

    def name(self, random_digits: str) -> str:
        """Return the id of a new request: 128 random bits in hexadecimal digits, and the mark of the output processor
        that is next in turn."""
        able = self._able()
        return random_digits + (able[0].mark if able else UNKNOWN_MARK)

    def resume(
        self,
        submit: pb.Submit,
        collector: Sink,
        index: int,
        media: RestorableMedia | None = None,
        *,
        may_begin: bool = False,
    ) -> Cancel:
        """Find the output processor that has a request of another gateway, or of another call, and collect its output
        from the beginning. ``submit`` is what would begin the request; if it moves later on, it is continued with that.

        Returns what cancels it. If no output processor has the request, and none that may have it is away, it begins
        anew with ``may_begin``: its client has nothing of it. Otherwise the collector fails with ``RequestLost``.
        """
        now = asyncio.get_running_loop().time()
        self._connect_all()
        request = PendingRequest(
            submit,
            collector,
            index,
            self._kept,
            self._budget,
            now=now,
            sought_until=now + SEARCH_SECONDS,
            media=media,
        )
        request.may_begin = may_begin
        if self._copies is not None:
            self._copies.add(request)
        self._seek(request)
        return partial(self._cancel, request)

    def withdraw(self, request_id: str, tenant: str) -> None:
        """End a request of another gateway, or of none, that its client does not want any more."""
        if self._connect_all():
            self._forget_withdrawn(MAX_WITHDRAWN - 1)
            self._withdrawn.pop((request_id, tenant), None)  # so that it is the last one to go
            self._withdrawn[request_id, tenant] = asyncio.get_running_loop().time() + SEARCH_SECONDS
        self._withdraw_at_all(request_id, tenant)

    async def recall(self, request_id: str, tenant: str, *, with_prompt: bool = False) -> pb.RecallResponse:
        """Return what a request was begun with that can be resumed. Raises ``RequestLost`` if no output processor has
        it: at once, unless one is away, or has been a short time ago. ``Unavailable`` if one that may have it is still
        away then, or does not answer."""
        self._connect_all()
        wanted = pb.RecallRequest(request_id=request_id, tenant=tenant, wants_prompt=with_prompt)
        from_copy = pb.RecallRequest(request_id=request_id, tenant=tenant, wants_prompt=with_prompt, from_copy=True)
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            num_silent = 0
            links = sorted(self._links, key=lambda link: link.rank(request_id))
            for link in links:
                if link.stream is None:
                    # One that is cut off keeps the request for as long, as in a search.
                    num_silent += loop.time() - link.changed_at < UNSETTLED_SECONDS
                    continue
                try:
                    found = await _recall(link, wanted)
                except errors.Unavailable:
                    num_silent += 1
                    continue
                if found is not None:
                    return found
            # As in a search: the gateway that has it may be about to place it again.
            now = loop.time()
            is_known = bool(links) and all(link.stream is not None for link in links)
            may_come = any(now - link.changed_at < SEARCH_SECONDS for link in links)
            if self._copies is not None and (found := await self._recall_any(from_copy)) is not None:
                return found
            if num_silent and now - asked_at >= SILENT_SECONDS:
                raise errors.Unavailable("An output processor that may have the request does not answer; retry.")
            waits = may_come and now - asked_at < SILENT_SECONDS
            if not (num_silent or waits) and (is_known or now - asked_at >= SEARCH_SECONDS):
                raise errors.RequestLost("The request is not known any more; send it again as a new request.")
            await asyncio.sleep(RETRY_SECONDS)

    async def until_kept(self, request_id: str, tenant: str) -> None:
        """Return once an output processor has a request of this gateway, which :meth:`recall` finds then."""
        wanted, pause = pb.RecallRequest(request_id=request_id, tenant=tenant), _ASK_SECONDS
        while await self._recall_any(wanted) is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS)

    async def has(self, request_id: str, tenant: str) -> bool:
        """Return whether one of those that are connected has a request, of whichever gateway."""
        return await self._recall_any(pb.RecallRequest(request_id=request_id, tenant=tenant)) is not None

    async def _recall_any(self, wanted: pb.RecallRequest) -> pb.RecallResponse | None:
        """Return what one of those that are connected says of a request; of a copy, if that is wanted."""
        for link in self._links[:]:
            if link.stream is not None and (link.stream.keeps_copies or not wanted.from_copy):
                with contextlib.suppress(errors.Unavailable):
                    if (found := await _recall(link, wanted)) is not None:
                        return found
        return None

    def on_open(self) -> None:
        """Send the requests that wait."""
        self._wake.set()
        for held, timer in list(self._held.items()):
            if held.debt.is_back():
                timer.cancel()
                self._ask_again(held)
        self._end_left()
        self._forget_withdrawn(MAX_WITHDRAWN)
        for request_id, tenant in self._withdrawn:
            self._withdraw_at_all(request_id, tenant)
        for request in list(self._sought):
            self._seek(request)

    def on_unknown(self, stream: ProcessStream, request: PendingRequest, *, is_copied: bool = False) -> None:
        """Ask the next output processor for a request that is to be resumed."""
        request.unknown_to.append(stream)
        if is_copied:
            # Another gateway has it, and may be starved for longer than a search lasts. Until its stream ends, an
            # output processor waits for it too.
            request.sought_until = max(request.sought_until, asyncio.get_running_loop().time() + SEARCH_SECONDS)
        self._seek(request)

    def on_moved(self, stream: ProcessStream, request: PendingRequest, error: errors.TokenloomError) -> None:
        """Place a request that an output processor has refused, or has ended before its end."""
        request.moved(stream, Cause.GONE if stream.leaving else Cause.FULL, error)
        self._wait(request)

    def on_media_lost(self, request: PendingRequest, error: errors.TokenloomError) -> None:
        """Put the files of a request at other encoders, then place it again."""
        if request.lost_media(error):
            assert self._spawn is not None
            self._restoring[request] = self._spawn(self._restore(request), name="restore the files of a request")

    async def _restore(self, request: PendingRequest) -> None:
        try:
            await request.restore()
        except errors.TokenloomError as error:
            request.fail(error)
        except Exception:
            log.exception("the files of a request could not be put at other encoders because of a bug")
            request.fail(errors.Internal("The files of the request could not be put at other encoders."))
        finally:
            self._restoring.pop(request, None)
        self._wait(request)

    def on_lost(self, stream: ProcessStream, requests: list[PendingRequest]) -> None:
        """Place the requests of a stream that has ended."""
        # A silent one may still work, and a broken connection is found out when the output processor is back.
        seems_ended = len(requests) == 1 and not (stream.leaving or stream.was_silent or stream.was_wrong)
        ended_alone = stream.incarnation if seems_ended else None
        connected = [each.stream.incarnation for each in self._links if each.stream is not None]
        loop = asyncio.get_running_loop()
        cause = Cause.SILENT if stream.was_silent else Cause.GONE
        address = stream.incarnation[0]
        is_back = partial(self._is_connected, address) if stream.was_silent else None
        for request in requests:
            if request.is_sought:
                # A loss is found out after 2.6 s and more: the search would be over before it has asked the others.
                request.sought_until = max(request.sought_until, loop.time() + SEARCH_SECONDS)
                self._seek(request)
                continue
            request.lost(
                cause,
                address,
                is_back=is_back,
                ended_alone=ended_alone,
                connected=connected,
                was_wrong=stream.was_wrong,
            )
            self._wait(request)

    def on_wrong(self, stream: ProcessStream, request: PendingRequest) -> None:
        """Place a request for which an output processor sent an invalid message."""
        request.lost(Cause.GONE, was_wrong=True)
        request.refused_by.append(stream)  # as long as there is another one
        self._wait(request)

    def on_left(self, link: OutputLink) -> None:
        """Note that an output processor is left, or was restarted."""
        self._has_left = any(each.is_left for each in self._links)
        if link.is_left:
            self._fall_backs.begin("wrong_peer", "it sent invalid messages", link.address)
        else:
            self._fall_backs.end("wrong_peer", link.address)

    def stubs(self) -> "list[output_processor_pb2_grpc.OutputProcessorAsyncStub]":
        """Return what calls the output processors that are connected, the next in turn first."""
        return [link.stub for link in self._able()]

    def _connect_all(self) -> bool:
        """Connect to all output processors for a while, because any of them may have a request that was begun
        elsewhere. Returns whether this gateway works with some of them otherwise: then others work with others."""
        self._members.widen()
        return self._members.is_wide

    def _forget_withdrawn(self, most: int) -> None:
        """Forget the withdrawals whose time is over, and the oldest ones beyond ``most``."""
        now = asyncio.get_running_loop().time()
        while self._withdrawn:
            oldest = next(iter(self._withdrawn))
            if self._withdrawn[oldest] >= now and len(self._withdrawn) <= most:
                return
            del self._withdrawn[oldest]

    def _withdraw_at_all(self, request_id: str, tenant: str) -> None:
        for link in self._links:  # it may have moved from the output processor that its id names
            if link.stream is not None:
                link.stream.withdraw(request_id, tenant)

    def _choose(self, request: PendingRequest) -> ProcessStream | None:
        """Return a stream among those that have not refused the request: the one that its id names, otherwise the next
        in turn. A request that may be running already goes where every gateway would send it."""
        mark = "" if request.refused_by or request.takes_over else mark_in(request.request_id)
        if mark:
            # The next in turn first: two of one name have one mark, too.
            for after in range(self._turn + 1, self._turn + 1 + len(self._links)):
                link = self._links[number := after % len(self._links)]
                if link.mark == mark and not link.is_left and (stream := link.stream) is not None:
                    if stream.leaving or link.address not in self._members.chosen:
                        break
                    self._turn = number
                    return stream
        able = self._able()
        if request.refused_by:
            able = [link for link in able if link.stream not in request.refused_by]
        if not able:
            return None
        if request.takes_over:
            # The same for every gateway, so that a repeated call meets its request without a table that gateways would
            # share.
            link = min(able, key=lambda link: link.rank(request.request_id))
        else:
            link = able[0]
            self._turn = self._links.index(link)
        return link.stream

    def _able(self) -> list[OutputLink]:
        """Return the links of the output processors that may get a new request, the next in turn first."""
        able, after, chosen = [], self._turn + 1, self._members.chosen
        for link in self._links[after:] + self._links[:after]:
            stream = link.stream  # read once: the thread of a scrape asks too, and the event loop may drop it meanwhile
            if stream is not None and not stream.leaving and link.address in chosen:
                able.append(link)
        if self._has_left:
            able = [link for link in able if not link.is_left] or able
        return able

    def _begin(self, request: PendingRequest) -> None:
        """Send a request that no output processor runs, or let it wait for one."""
        if (stream := self._choose(request)) is not None:
            if self._copies is not None:
                self._copies.begin(request, stream)
            stream.submit(request)
        else:
            self._wait(request)

    def _begin_unknown(self, request: PendingRequest) -> None:
        """Begin a request that was sought, but could not be found."""
        if not request.can_begin:
            request.fail(errors.Unavailable("No output processor has the request; send it again."))
            return
        request.sought_until, request.seeks_copy = 0.0, False
        request.unknown_to.clear()
        request.withdraw = None  # it has not moved
        self._begin(request)

    def _seek(self, request: PendingRequest) -> None:
        """Ask the likeliest output processor that was not asked yet. Wait for those that are not connected; with a
        request that may begin anew, only for those that this gateway does not work with otherwise."""
        if (timer := self._sought.pop(request, None)) is not None:
            timer.cancel()
        if _is_over(request):
            return
        links = sorted(self._links, key=lambda link: link.rank(request.request_id))
        streams = [link.stream for link in links]
        stream = next((each for each in streams if each is not None and each not in request.unknown_to), None)
        if stream is not None:
            stream.seek(request)
            return
        if self._copies is not None and not request.seeks_copy:
            # Only now: whatever runs it, or is about to place it again, comes before a copy.
            request.seeks_copy = True
            request.unknown_to.clear()
            self._seek(request)
            return
        now = asyncio.get_running_loop().time()
        if request.takes_over:
            is_over = now >= request.sought_until or (bool(streams) and all(streams))
            if is_over or not self._members.is_wide:
                self._begin_unknown(request)
            else:
                self._seek_again(request, request.sought_until)
        elif (until := self._end_of_search(request)) <= now and request.may_begin and request.can_begin:
            # Its gateway was lost before any output processor had read of it.
            request.is_accepted = True  # as the gateway had
            self._begin_unknown(request)
        elif until <= now:
            request.fail(errors.RequestLost("The request is not known any more; send it again as a new request."))
        else:
            self._seek_again(request, min(until, now + RETRY_SECONDS))

    def _end_of_search(self, request: PendingRequest) -> float:
        """Return when a request is lost that no output processor has."""
        until = request.sought_until
        for link in self._links:
            # An output processor that is cut off, or not connected yet, keeps the request for UNSETTLED_SECONDS. After
            # any change of a link, the gateway that had the request may still hold it, to place it again: at that
            # moment every output processor answers that it does not have it.
            until = max(until, link.changed_at + (UNSETTLED_SECONDS if link.stream is None else SEARCH_SECONDS))
        return until

    def _seek_again(self, request: PendingRequest, when: float) -> None:
        """Ask all output processors again at some time, or as soon as another one is connected."""

        def seek() -> None:
            request.unknown_to.clear()
            request.seeks_copy = False
            self._seek(request)

        self._sought[request] = asyncio.get_running_loop().call_at(when, seek)

    def _wait(self, request: PendingRequest) -> None:
        """Let a request wait until :meth:`_place_waiting` finds a stream for it, unless it has ended."""
        if not _is_over(request):
            self._waiting[request] = None
            self._wake.set()

    def _hold(self, request: PendingRequest) -> None:
        """End a request that no output processor has accepted with its refusal; let another one ask again later."""
        if not request.is_accepted:
            request.fail_as_refused()
            return
        request.refused_by.clear()
        self._held[request] = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._ask_again, request)

    def _ask_again(self, request: PendingRequest) -> None:
        del self._held[request]
        self._wait(request)

    def _cancel(self, request: PendingRequest) -> None:
        self._waiting.pop(request, None)
        if (restore := self._restoring.pop(request, None)) is not None:
            restore.cancel()
        for timers in (self._sought, self._held):
            if (timer := timers.pop(request, None)) is not None:
                timer.cancel()
        self._left.discard(request)  # a call of another gateway may still want what was left
        if self._copies is not None:
            self._copies.end(request)
        request.cancel()

    async def _place_waiting(self) -> None:
        """Send requests that wait, until cancelled. One that every output processor has refused ends or waits."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            num_placed = 0
            while self._waiting:
                request = next(iter(self._waiting))
                if _is_over(request):
                    del self._waiting[request]
                    continue
                stream = self._choose(request)
                if stream is None and not self._able():
                    break
                del self._waiting[request]
                if stream is None or not request.debt.pay():
                    self._hold(request)
                else:
                    if request.withdraw is not None:  # otherwise it has only waited
                        self._count_moved()
                    stream.submit(request, again=True)
                    if request.left_at:
                        self._left.add(request)
                        self._look_at_left_later()
                num_placed += 1
                if num_placed % _PLACED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _end_left(self) -> None:
        """Let output processors that are connected again end what they still run of requests that another one has."""
        if self._left_timer is not None:
            self._left_timer.cancel()
            self._left_timer = None
        connected = {link.address: link.stream for link in self._links if link.stream is not None}
        # Until output comes it may not have arrived there, and that one may be lost too: what was left may be all
        # there is of it. Where the call has failed, another one may want that.
        self._left = {each for each in self._left if not each.collector.failed}
        for request in list(self._left):
            if request.num_live and not (request.has_progressed and request.runner in connected.values()):
                continue
            for address in request.left_at & connected.keys():
                request.left_at.discard(address)
                if connected[address] is not request.runner:  # which ends it itself
                    connected[address].moved(request)
            if not request.left_at or not request.num_live:
                self._left.discard(request)
        if any(not each.left_at.isdisjoint(connected) for each in self._left):
            self._look_at_left_later()

    def _look_at_left_later(self) -> None:
        if self._left_timer is None:
            self._left_timer = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._end_left)

    def _is_connected(self, address: str) -> bool:
        return any(link.address == address and link.stream is not None for link in self._links)

    async def _keep(self, link: OutputLink) -> None:
        try:
            while link.address in self._members.chosen:  # also if it has come back while its channel was closing
                async with self._channels.open(link.address, "output_processor") as channel:
                    stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
                    while link.address in self._members.chosen:  # requests that have begun continue to their end
                        await link.connect(stub)
        finally:
            self._links.remove(link)


_UNKNOWN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)
"""How an output processor answers that does not have a request; the last two: one of an older release, which knows no
recipes."""


async def _recall(link: OutputLink, wanted: pb.RecallRequest) -> pb.RecallResponse | None:
    """Ask an output processor; return None if it does not have the request. Raises ``Unavailable`` if it does not
    say."""
    silence = errors.Unavailable("The output processor does not answer.")
    try:
        return await link.stub.Recall(wanted, timeout=RECALL_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNKNOWN:
            return None
        raise silence from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise silence from None  # its channel was closed with this call in it


def _is_over(request: PendingRequest) -> bool:
    """Return whether a request has ended, or ends now because a later call runs it."""
    # A repeat takes the place of the call before it, whose output processor ends that one. If its stream broke before,
    # both were sent again: a tenant ran two more outputs than it had places.
    if request.collector.is_superseded and not request.collector.failed:
        request.fail(errors.Aborted("The answer continues in another call."))
    return request.collector.failed
