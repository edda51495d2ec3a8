"""Keeps requests that can be resumed: those whose gateway was lost, for a while those that have ended, and copies of
those that other output processors run."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeAlias, TypeVar

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit, Reservation
from tokenloom.services.runtime.liveness import is_late
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.output_processor_pb2 import JournalCopies, Resume, SampleJournal, Submit

Peer: TypeAlias = tuple[str, int]
"""A gateway's name and epoch."""
RequestKey: TypeAlias = tuple[str, str]
"""A request's tenant and its id: a client may name an id that a request of another tenant has."""

DRAIN_SECONDS = 5.0
"""Time that requests without a gateway have while the output processor drains: a client resumes within a second."""
RETURNED_SECONDS = 20.0
"""Time that a lost request, or a copy, has when its gateway is back: the gateway sends it again, asks for it, or says
that it has moved, but may be starved or killed before that. After 5 s a gateway that was stopped again and again still
had some that waited to be sent, and the call of a client that had left it found them nowhere."""


class RetainedRequest(Protocol):
    """A request that can be resumed."""

    @property
    def key(self) -> RequestKey: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def can_repeat(self) -> bool: ...

    def cancel(self) -> None:
        """End it, because its output is not wanted any more."""

    def detach(self) -> None:
        """Continue without a stream."""


R = TypeVar("R", bound=RetainedRequest)


class KeptRequests(Generic[R]):
    """Finds the requests that can be resumed by their ids.

    A request whose gateway was lost is cancelled after ``seconds``, or a few seconds after the same incarnation of the
    gateway connects again, unless it is submitted again before that: the gateway has its requests, and may have sent
    them to another output processor. If that gateway is lost again meanwhile, the first time counts. A request that has
    ended without an error is forgotten after ``seconds``, or when more recent ones fill ``max_bytes``. The limit of
    live requests bounds those that run.

    Attributes:
        copies: Those of requests that other output processors run.
    """

    def __init__(
        self, on_failure: Callable[[BaseException], None], seconds: float, max_bytes: int, max_copied_bytes: int = 0
    ) -> None:
        """``on_failure``: gets the error of a task that fails. ``max_copied_bytes``: room for copies."""
        self.tasks = Tasks(on_failure)
        self.copies = CopiedRequests(seconds, max_copied_bytes)
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._bytes = AdmissionLimit(max_bytes)
        self._known: dict[RequestKey, R] = {}
        self._others: dict[RequestKey, list[R]] = {}  # live ones beside the one that is known; the oldest first
        # Requests without a stream, with the time at which each ends if its gateway stays away.
        self._lost: dict[RequestKey, tuple[R, Peer, asyncio.TimerHandle, float]] = {}
        self._ended: dict[RequestKey, tuple[R, Reservation, float]] = {}  # with bytes and time to go; the oldest first
        self._purge_timer: asyncio.TimerHandle | None = None
        self._connected: dict[Peer, int] = {}

    @property
    def num_lost(self) -> int:
        """Requests that run without a gateway."""
        return len(self._lost)

    def add(self, request: R, peer: Peer | None = None) -> None:
        """Make a request known. One of the same key that has ended, or that the same gateway had lost, is forgotten;
        another one that can be resumed stays known instead, until it ends. ``peer``: the gateway that sends it; None:
        it runs without one."""
        key = request.key
        if key in self._ended:
            self._forget(key)
        elif (lost := self._lost.get(key)) is not None and (peer in (None, lost[1]) or not lost[0].can_repeat):
            # Not of another gateway: a later call may have had it there, unknown to the one that sends it now. That one
            # took away with its end what the later one had left.
            lost[0].cancel()
        known, other = self._known.get(key), None
        if known is not None and known.can_repeat:
            other = request
        else:
            self._known[key], other = request, known
        if other is not None:
            self._others.setdefault(key, []).append(other)

    def make_way(self, request_id: str, tenant: str) -> bool:
        """End the request that has no stream, because its gateway submits it again. Returns whether there was one."""
        if (lost := self._lost.get((tenant, request_id))) is None:
            return False
        lost[0].cancel()
        return True

    def find(self, wanted: Resume | Submit) -> R | None:
        """Return the request that a gateway wants to continue, None if it is not known, or is another tenant's.

        Raises ``BodyChanged`` if it began with another body, ``InvalidArgument`` if it has another number of samples.
        """
        if (request := self.known(wanted.request_id, wanted.tenant)) is not None:
            _check_same(wanted, request.fingerprint, request.num_samples)
        return request

    def known(self, request_id: str, tenant: str) -> R | None:
        """Return a request that can be resumed; None if it is not known, or is another tenant's."""
        request = self.any_of(request_id, tenant)
        return None if request is None or not request.can_repeat else request

    def any_of(self, request_id: str, tenant: str) -> R | None:
        """Return a request whether or not its output can be sent again; None as of :meth:`known`."""
        return self._known.get((tenant, request_id))

    def unrepeatable(self, wanted: Resume | Submit) -> R | None:
        """Return a request that a gateway wants to continue but whose output cannot be sent again; None and errors as
        of :meth:`find`."""
        if (request := self.any_of(wanted.request_id, wanted.tenant)) is None or request.can_repeat:
            return None
        _check_same(wanted, request.fingerprint, request.num_samples)
        return request

    def withdraw(self, request_id: str, tenant: str) -> None:
        """End a request that its client does not want any more, and forget it, also where it was sent again meanwhile.
        Nothing happens if it is not known."""
        self.copies.withdraw(request_id, tenant)
        key = tenant, request_id
        for other in self._others.get(key, [])[:]:  # first: the last of them would become the known one
            other.cancel()
        if key in self._ended:
            self._forget(key)
        elif (request := self._known.get(key)) is not None:
            request.cancel()

    def moved(self, request_id: str, tenant: str, peer: Peer) -> None:
        """End a request that a gateway had lost and has sent to another output processor, unless it has a stream again:
        a call of another gateway found it first, and its answer would go on here with other tokens."""
        lost = self._lost.get((tenant, request_id))
        if lost is not None and lost[1] == peer:
            lost[0].cancel()

    def connect(self, peer: Peer) -> None:
        """Note a gateway's stream. Requests that this incarnation lost have :data:`RETURNED_SECONDS` from now on: it
        submits them again, here or elsewhere, or asks for them if it had resumed them."""
        self._connected[peer] = self._connected.get(peer, 0) + 1
        now = asyncio.get_running_loop().time()
        for request, lost_by, timer, until in list(self._lost.values()):
            if lost_by == peer and now < until:  # after that, one that comes and goes prolongs nothing
                timer.cancel()
                self._keep(request, peer, min(self._seconds, RETURNED_SECONDS), until)

    def disconnect(self, peer: Peer) -> None:
        """Note the end of a gateway's stream. What it had lost before has the rest of its time if it is away again: it
        may have been killed before it sent that again."""
        self._connected[peer] -= 1
        if self._connected[peer]:
            return
        del self._connected[peer]
        now = asyncio.get_running_loop().time()
        for request, lost_by, timer, until in list(self._lost.values()):
            if lost_by == peer and timer.when() < until:
                timer.cancel()
                self._keep(request, peer, until - now, until)

    def lose(self, request: R, peer: Peer) -> bool:
        """Keep a request whose gateway was lost. Returns False if it cannot be resumed or need not be."""
        if not self._seconds or not self._take_place(request):
            return False
        # A gateway with another stream here is alive: it has ended this one itself, and may have sent the request on
        # that one already, which then takes the place of this one.
        is_back = peer in self._connected
        if is_back and any(each.can_repeat for each in self._others.get(request.key, ())):
            return False
        request.detach()
        until = asyncio.get_running_loop().time() + self._seconds
        self._keep(request, peer, min(self._seconds, RETURNED_SECONDS) if is_back else self._seconds, until)
        return True

    def attached(self, request: R) -> None:
        """Note that a request has a stream again."""
        if (lost := self._lost.pop(request.key, None)) is not None:
            lost[2].cancel()

    def prolong(self, request: R) -> None:
        """Keep a request that has ended for its whole time again, because a call resumes it: the client may lose that
        connection, too."""
        if (ended := self._ended.pop(request.key, None)) is not None:
            self._ended[request.key] = request, ended[1], asyncio.get_running_loop().time() + self._seconds

    def ended(self, request: R) -> None:
        """Keep the output of a request that has ended as its client asked; forget any other one."""
        key = request.key
        if self._known.get(key) is not request:
            self._leave_others(request)
            return
        self.attached(request)
        num_bytes = request.num_bytes
        if not request.is_complete or not self._seconds or (reservation := self._reserve(num_bytes)) is None:
            del self._known[key]
            if others := self._others.get(key):
                # The gateway sent it again on another stream before the end of the first one was noticed. Both run, and
                # a gateway that continues the request must find one of them.
                self._known[key] = others[-1]
                self._leave_others(others[-1])
            return
        until = asyncio.get_running_loop().time() + self._seconds
        self._ended[key] = request, reservation, until
        if self._purge_timer is None:
            self._purge_timer = asyncio.get_running_loop().call_at(until, self._purge)

    def hurry(self) -> None:
        """Wait less for gateways, because the output processor drains."""
        for request, peer, timer, _ in list(self._lost.values()):
            timer.cancel()
            self._keep(request, peer, min(self._seconds, DRAIN_SECONDS))
        self._seconds = min(self._seconds, DRAIN_SECONDS)

    async def close(self) -> None:
        """Cancel the requests without a gateway, and forget all others."""
        for request, *_ in list(self._lost.values()):
            request.cancel()
        for key in list(self._ended):
            self._forget(key)
        if self._purge_timer is not None:
            self._purge_timer.cancel()
        self.copies.close()
        await self.tasks.close()

    def _take_place(self, request: R) -> bool:
        """Let a request that is about to be lost be the one that is known. Returns False if another one is lost."""
        key = request.key
        if (known := self._known.get(key)) is request:
            return True
        others = self._others.get(key, [])
        if known is None or key in self._lost or request not in others:
            return False
        others[others.index(request)] = known  # whose gateway lives, and ends it if its call was the earlier one
        self._known[key] = request
        return True

    def _leave_others(self, request: R) -> None:
        others = self._others.get(request.key, [])
        if request in others:
            others.remove(request)
            if not others:
                del self._others[request.key]

    def _keep(self, request: R, peer: Peer, seconds: float, until: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds

        def expire() -> None:
            if is_late(due):  # what is read next may submit the request again, or ask for it
                self._keep(request, peer, min(self._seconds, RETURNED_SECONDS), until)
            else:
                request.cancel()

        self._lost[request.key] = request, peer, loop.call_at(due, expire), until

    def _purge(self) -> None:
        """Forget the requests whose time is over, and wait for the next one."""
        self._purge_timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._ended:
            key, (_, _, until) = next(iter(self._ended.items()))
            if until > now:
                self._purge_timer = loop.call_at(until, self._purge)
                return
            self._forget(key)

    def _reserve(self, num_bytes: int) -> Reservation | None:
        """Reserve memory for the output of a request, in place of the oldest ones if need be; None: it never fits."""
        if num_bytes > self._max_bytes:
            return None
        while (reservation := self._bytes.take(num_bytes)) is None:
            self._forget(next(iter(self._ended)))
        return reservation

    def _forget(self, key: RequestKey) -> None:
        _, reservation, _ = self._ended.pop(key)
        reservation.release()
        del self._known[key]


def _check_same(wanted: Resume | Submit, fingerprint: bytes, num_samples: int) -> None:
    """Raise ``BodyChanged`` if a request began with another body than the one that is wanted, and ``InvalidArgument``
    if it has another number of samples."""
    if wanted.fingerprint and wanted.fingerprint != fingerprint:
        raise errors.BodyChanged("The body differs from the body that this request was begun with.")
    if num_samples != max(wanted.num_samples, 1):
        message = f"The request has {num_samples} samples, not {max(wanted.num_samples, 1)}."
        raise errors.InvalidArgument(message, "num_samples")


_COPY_BYTES = 2048
"""Memory of the objects of a copy."""
_TOKEN_BYTES = 4
_NO_GATEWAY: Peer = "", 0
"""Has lost the copies that their gateway has left: it does not come back for them."""


class CopiedRequest:
    """Holds a copy of a request that another output processor runs, and what its gateway had of the output.

    Attributes:
        submit: What continues it.
        number: On the stream of its gateway.
        numbers: The copies of that stream by their numbers.
        num_bytes: Bytes of memory that it takes, about.
        lost_by: The gateway whose stream has ended; None: it lives, and has the request.
        expires_at: When it is forgotten then, in seconds of the event loop's clock.
        kept_until: When it is forgotten if the gateway stays away.
    """

    __slots__ = ("_until", "expires_at", "kept_until", "lost_by", "num_bytes", "number", "numbers", "submit")

    def __init__(self, submit: Submit, numbers: "dict[int, CopiedRequest]", now: float) -> None:
        """``submit``: with the number as its slot. ``now``: in seconds, when its timeout begins."""
        self.submit = submit
        self.number = submit.slot
        self.numbers = numbers
        self.num_bytes = _COPY_BYTES + submit.ByteSize()
        self.lost_by: Peer | None = None
        self.expires_at = self.kept_until = 0.0
        self._until = now + submit.timeout.ToNanoseconds() / 1e9 if submit.HasField("timeout") else None

    def add(self, news: Iterable[SampleJournal]) -> int:
        """Add what came of its output, and return the bytes by which it has grown."""
        journals = {journal.sample_index: journal for journal in self.submit.journals}
        num_bytes = 0
        for new in news:
            journal = journals.get(new.sample_index)
            if journal is None:
                journal = self.submit.journals.add(sample_index=new.sample_index)
            journal.token_ids.extend(new.token_ids)
            num_bytes += _TOKEN_BYTES * len(new.token_ids)
            if new.weights or new.numerics:
                journal.weights[:] = new.weights
                journal.numerics, journal.mixed_numerics = new.numerics, new.mixed_numerics
            if new.finished:
                journal.finished = True
                journal.end.CopyFrom(new.end)
                num_bytes += new.end.ByteSize()
        self.num_bytes += num_bytes
        return num_bytes

    def continued(self, now: float) -> Submit:
        """Return what runs it here, with the time that it has left. All of its text is made again."""
        submit = self.submit
        submit.take_over = False
        for journal in submit.journals:
            journal.emitted_text_bytes = 0
        if self._until is not None:
            submit.timeout.FromNanoseconds(max(round((self._until - now) * 1e9), 0))
        return submit


class CopiedRequests:
    """Keeps copies of requests that other output processors run (``JournalCopies``), within ``max_bytes``.

    While the stream of its gateway lives, a copy is kept and not used: the gateway has the request, and places it again
    if the output processor that runs it is lost. After the end of the stream a copy is kept for ``seconds``, or for a
    few once the gateway is back: it may be starved or killed before it has sent another one. If it is lost again
    meanwhile, the first time counts. One of a request that has ended without its client is kept for ``seconds``, too.

    Attributes:
        num_copies: How many are kept.
        num_bytes: Bytes of memory that all of them take, about.
        count: Called with what became of a copy that was not ended by its gateway: ``resumed``, ``expired``, or
            ``dropped`` because there was no room.
    """

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.num_copies = self.num_bytes = 0
        self.count: Callable[[str], object] = str
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._of_tenants: dict[str, dict[str, CopiedRequest]] = {}  # by id, the newest last; bounded by the bytes
        self._tenant_bytes: Counter[str] = Counter()
        self._numbers: dict[object, dict[int, CopiedRequest]] = {}  # by stream
        self._timers: dict[float, asyncio.TimerHandle] = {}  # by the times at which copies expire, within the seconds

    def receive(self, stream: object, copies: JournalCopies) -> None:
        """Take what a gateway sends on a stream."""
        for each in copies.withdrawn:
            self.withdraw(each.request_id, each.tenant)
        numbers = self._numbers.setdefault(stream, {})
        now = asyncio.get_running_loop().time()
        for begun in copies.begun:
            submit = Submit()
            submit.CopyFrom(begun)  # the message would keep all copies that came with it
            self.withdraw(submit.request_id, submit.tenant)
            self._add(CopiedRequest(submit, numbers, now))
        for output in copies.outputs:
            if (copy := numbers.get(output.copy)) is not None:
                self._charge(copy.submit.tenant, copy.add(output.journals))
        for number in copies.ended:
            if (copy := numbers.get(number)) is not None:
                self._forget(copy)
        for number in copies.left:
            if (copy := numbers.pop(number, None)) is not None:
                copy.lost_by, copy.kept_until = _NO_GATEWAY, now + self._seconds
                self._expire_at(copy, copy.kept_until)
        self._make_room()  # last: what ends makes room for what begins with it

    def any_of(self, request_id: str, tenant: str) -> CopiedRequest | None:
        """Return the copy of a request; None: there is none. Its gateway may live, and is about to send the request
        again if nothing runs it."""
        return self._of_tenants.get(tenant, {}).get(request_id)

    def find(self, request_id: str, tenant: str) -> CopiedRequest | None:
        """Return a copy whose gateway is lost; None: there is none."""
        copy = self.any_of(request_id, tenant)
        return None if copy is None or copy.lost_by is None else copy

    def take(self, wanted: Resume) -> Submit | None:
        """Return what continues a request whose gateway is lost, and forget the copy; None: there is none. Raises as
        :meth:`KeptRequests.find`."""
        if (copy := self.find(wanted.request_id, wanted.tenant)) is None:
            return None
        _check_same(wanted, copy.submit.fingerprint, copy.submit.num_samples or 1)
        self._forget(copy)
        self.count("resumed")
        return copy.continued(asyncio.get_running_loop().time())

    def withdraw(self, request_id: str, tenant: str) -> None:
        """Forget the copy of a request. Nothing happens if there is none."""
        if (copy := self.any_of(request_id, tenant)) is not None:
            self._forget(copy)

    def connect(self, peer: Peer) -> None:
        """Keep the copies of a gateway that is back for :data:`RETURNED_SECONDS`: it sends those of the requests that
        it still has."""
        now = asyncio.get_running_loop().time()
        self._expire_soon([copy for copy in self._all() if copy.lost_by == peer and now < copy.kept_until])

    def lose(self, stream: object, peer: Peer) -> None:
        """Note that the stream of a gateway has ended. Its copies may be used from now on, for a while. Those of an
        earlier stream have the rest of their time, as in :meth:`KeptRequests.disconnect`."""
        now = asyncio.get_running_loop().time()
        for copy in self._numbers.pop(stream, {}).values():
            copy.lost_by, copy.kept_until = peer, now + self._seconds
        for copy in self._all():
            if copy.lost_by == peer and copy.expires_at < copy.kept_until:
                self._expire_at(copy, copy.kept_until)

    def close(self) -> None:
        """Forget all copies."""
        for timer in self._timers.values():
            timer.cancel()
        for copy in self._all():
            self._forget(copy)

    def _expire_soon(self, copies: Iterable[CopiedRequest]) -> None:
        due = asyncio.get_running_loop().time() + min(self._seconds, RETURNED_SECONDS)
        for copy in copies:
            self._expire_at(copy, due)

    def _expire_at(self, copy: CopiedRequest, due: float) -> None:
        copy.expires_at = due
        if due not in self._timers:
            self._timers[due] = asyncio.get_running_loop().call_at(due, self._expire, due)

    def _expire(self, due: float) -> None:
        """Forget the copies whose time is over, and that have not been used."""
        del self._timers[due]
        copies = [copy for copy in self._all() if copy.lost_by is not None and copy.expires_at <= due]
        if is_late(due):  # as in :class:`KeptRequests`
            self._expire_soon(copies)
            return
        for copy in copies:
            self._forget(copy)
            self.count("expired")

    def _all(self) -> list[CopiedRequest]:
        return [copy for copies in self._of_tenants.values() for copy in copies.values()]

    def _add(self, copy: CopiedRequest) -> None:
        if (before := copy.numbers.get(copy.number)) is not None:  # no gateway does that; it would never be forgotten
            self._forget(before)
        self.num_copies += 1
        copy.numbers[copy.number] = copy
        self._of_tenants.setdefault(copy.submit.tenant, {})[copy.submit.request_id] = copy
        self._charge(copy.submit.tenant, copy.num_bytes)

    def _charge(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._tenant_bytes[tenant] += num_bytes

    def _make_room(self) -> None:
        """Drop the newest copies of the tenant that has most bytes, until the rest fits."""
        # The tenant with most: one that fills the room takes it from itself. Its newest: the older ones have more
        # output that would have to be computed again.
        while self.num_bytes > self._max_bytes:
            tenant = max(self._tenant_bytes, key=lambda name: self._tenant_bytes[name])
            self._forget(next(reversed(self._of_tenants[tenant].values())))
            self.count("dropped")

    def _forget(self, copy: CopiedRequest) -> None:
        tenant = copy.submit.tenant
        self.num_copies -= 1
        copy.numbers.pop(copy.number, None)
        of_tenant = self._of_tenants[tenant]
        del of_tenant[copy.submit.request_id]
        self._charge(tenant, -copy.num_bytes)
        if not of_tenant:
            del self._of_tenants[tenant], self._tenant_bytes[tenant]
