"""Keeps copies of requests at second output processors: what began them, and the tokens that arrived. With a copy a
call can resume its request although this gateway and the output processor that runs it are lost together."""

import asyncio
from collections.abc import Sequence
from functools import lru_cache

from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.runtime import addresses

from .pending_request import Origin, PendingRequest, journal_bytes
from .process_stream import OutputLink, ProcessStream

COPY_SECONDS = 0.1
"""How often new tokens are sent, those of all requests of an output processor in one message: what a copy may lack.
They are computed again, with the same result where the model computes the same in every batch."""
_LOOKED_AT_ONCE = 64
"""Requests that are looked at before the event loop serves other work."""
_FALL_BACK = "single_journal"


class _Copy:
    """Knows what an output processor has of a request.

    Attributes:
        holder: The stream to it.
        number: Of the copy on that stream.
        num_live: Samples of the request that had not ended.
        num_sent: By sample, the tokens that were sent; without those whose end was sent, and without those that begin
            anew.
        origins: By sample, what was sent of what computes it.
    """

    __slots__ = ("holder", "num_live", "num_sent", "number", "origins")

    def __init__(self, holder: ProcessStream, number: int, request: PendingRequest, num_sent: dict[int, int]) -> None:
        self.holder = holder
        self.number = number
        self.num_live = request.num_live
        self.num_sent = num_sent
        self.origins: dict[int, Origin] = dict(request.origins)


class JournalCopies:
    """Sends copies of the requests that calls may resume, each to an output processor that does not run it, and on
    another host if there is one.

    A copy that is lost, or whose output processor leaves or is the one that runs the request now, is made anew. What
    waits to be sent is bounded: new tokens wait in their collectors while an output processor reads nothing.
    """

    def __init__(self, links: Sequence[OutputLink], fall_backs: FallBacks, model: str) -> None:
        """``links``: to all output processors; others add to it and take away. ``model``: of this mesh."""
        self._links = links
        self._fall_backs = fall_backs
        self._model = model
        self._copies: dict[PendingRequest, _Copy | None] = {}  # bounded by the requests that the gateway admits
        self._calls: dict[tuple[str, str], list[PendingRequest]] = {}  # the same by key, the latest call of each last
        self._has_any = asyncio.Event()
        self._last_number = 0
        self._turn = 0

    def add(self, request: PendingRequest) -> None:
        """Keep a copy of a request from when it runs to :meth:`end`, if a call may resume it."""
        if request.can_be_copied:
            self._copies[request] = None
            self._calls.setdefault(request.key, []).append(request)
            self._has_any.set()

    def begin(self, request: PendingRequest, runner: ProcessStream) -> None:
        """Send the copy of a request that is about to be sent to its output processor: before any token of it arrives,
        the copy is with the kernel, which delivers it although this process is killed."""
        if request in self._copies:
            self._place(request, runner)

    def end(self, request: PendingRequest) -> None:
        """Let the copy of a request be forgotten, because its call has ended; or be left for a while, if the request
        has ended without its client."""
        copy = self._copies.pop(request, None)
        if request in (calls := self._calls.get(request.key, [])):
            calls.remove(request)
            if not calls:
                del self._calls[request.key]
        if copy is not None and not copy.holder.has_ended:
            if request.collector.is_unattended and not (request.num_live or request.collector.failed):
                # Its client may come back when the output processor is lost that has the answer.
                self._send_news(request, copy)
                copy.holder.copies().left.append(copy.number)
            else:
                copy.holder.copies().ended.append(copy.number)
        if not self._copies:
            self._has_any.clear()
            self._fall_backs.end(_FALL_BACK, self._model)

    async def run(self) -> None:
        """Send what is new, again and again, until cancelled."""
        while True:
            await self._has_any.wait()
            await asyncio.sleep(COPY_SECONDS)
            await self._look()

    async def _look(self) -> None:
        """Send what is new of all requests, and copies of those that have none."""
        # One that reads nothing gets one message: what follows waits where it is, and is sent together.
        behind = [stream for link in self._links if (stream := link.stream) is not None and stream.owes_copies]
        num_single = 0
        for number, request in enumerate(list(self._copies), 1):
            if request in self._copies and not request.collector.failed:
                num_single += not self._update(request, behind)
            if number % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if num_single:
            self._fall_backs.begin(_FALL_BACK, "no second output processor is connected", self._model)
        else:
            self._fall_backs.end(_FALL_BACK, self._model)

    def _update(self, request: PendingRequest, behind: Sequence[ProcessStream]) -> bool:
        """Bring the copy of a request up to date. Return False if no output processor can keep one."""
        copy, runner = self._copies[request], request.runner
        if copy is None or copy.holder.has_ended or copy.holder.leaving or copy.holder is runner:
            if not isinstance(runner, ProcessStream) or request.is_sought or self._is_later_copied(request):
                return True  # it has not begun; or it is sought, and what runs it is not known
            # Also while it waits to be sent again: until then this gateway alone has it.
            return self._place(request, runner)
        if copy.holder not in behind:
            self._send_news(request, copy)
        return True

    def _is_later_copied(self, request: PendingRequest) -> bool:
        """Return whether a later call of the same request has a copy: an output processor keeps one of each, and would
        forget the later call's with the end of the earlier one."""
        calls = self._calls[request.key]
        return len(calls) > 1 and any(self._copies[each] is not None for each in calls[calls.index(request) + 1 :])

    def _place(self, request: PendingRequest, runner: ProcessStream) -> bool:
        """Send a copy of a request. Return False if there is no output processor for it."""
        if (holder := self._choose(runner)) is None:
            return False
        self._last_number += 1
        submit = request.copied(self._last_number, now=asyncio.get_running_loop().time())
        if submit is None:  # its prompt was too large to be kept
            return True
        if request.may_be_known:
            # The copies of the gateways that had it before are out of date: another seed may have been drawn since.
            for link in self._links:
                if link.stream is not None and link.stream.keeps_copies:
                    link.stream.copies().withdrawn.add(request_id=submit.request_id, tenant=submit.tenant)
        if (before := self._copies[request]) is not None and not before.holder.has_ended:
            before.holder.copies().ended.append(before.number)
        num_sent = dict.fromkeys(range(request.num_samples) if request.keeps_journals else (), 0)
        for journal in submit.journals:
            if journal.finished:
                del num_sent[journal.sample_index]
            else:
                num_sent[journal.sample_index] = len(journal.token_ids)
        holder.copies(request.num_bytes + journal_bytes(submit.journals)).begun.append(submit)
        self._copies[request] = _Copy(holder, self._last_number, request, num_sent)
        for earlier in self._calls[request.key]:
            if earlier is request:
                break
            # This one takes its place. The end is said, too: where it is sent together with the withdrawal, that comes
            # first, and the copy stayed until the stream ended.
            if (replaced := self._copies[earlier]) is not None and not replaced.holder.has_ended:
                replaced.holder.copies().ended.append(replaced.number)
            self._copies[earlier] = None
        return True

    def _choose(self, runner: ProcessStream) -> ProcessStream | None:
        """Return the next one in turn that can keep a copy, on another host than the one that runs the request."""
        able = [
            link
            for link in self._links
            if (stream := link.stream) is not None
            and stream is not runner
            and stream.keeps_copies
            and not (stream.leaving or link.is_left)
        ]
        if not able:
            return None
        host = _host_of(runner.incarnation[0])
        able = [link for link in able if _host_of(link.address) != host] or able
        self._turn += 1
        return able[self._turn % len(able)].stream

    def _send_news(self, request: PendingRequest, copy: _Copy) -> None:
        """Send the tokens and the ends of a request that came since the last time."""
        first, collector = request.first_index, request.collector
        may_have_ended, copy.num_live = copy.num_live != request.num_live, request.num_live
        for index, num_sent in list(copy.num_sent.items()):
            num_tokens = collector.num_tokens(first + index)
            if num_tokens == num_sent and not may_have_ended:
                continue
            journal = collector.journal(first + index, index, num_sent)
            if num_tokens == num_sent and not journal.finished:
                continue
            journal.ClearField("emitted_text_bytes")  # a call that resumes gets all of the text again
            origin = request.origins.get(index)
            if origin is not None and copy.origins.get(index) is not origin:
                copy.origins[index] = origin
                journal.weights.extend(origin.weights)
                journal.numerics, journal.mixed_numerics = origin.numerics, origin.is_mixed
            if journal.finished:
                del copy.num_sent[index]
            else:
                copy.num_sent[index] = num_tokens
            copy.holder.copies(journal_bytes((journal,))).outputs.add(copy=copy.number, journals=(journal,))


@lru_cache(maxsize=1024)
def _host_of(address: str) -> str:
    """Return the host in an address; empty: this one."""
    return addresses.parse(address).host
