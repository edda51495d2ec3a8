"""Keeps the files of requests by their digests, up to a number of bytes."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenloom.request import errors
from tokenloom.v1.encoder_pb2 import PutResponse

MAX_OWNERS = 256
"""Of one file: a client may vary the salts of its requests without end."""
MAX_PINS = 1 << 16
"""Files of live requests, each counted for each request."""


class FileOwner(NamedTuple):
    """Says who may ask for a file: what one tenant has put does not show to another one."""

    tenant: str
    salt: bytes


class Pin(NamedTuple):
    """Names a request that needs a file."""

    tenant: str
    request_id: str


@dataclass(slots=True)
class MediaFile:
    """Holds one file.

    Attributes:
        facts: What ``Put`` answers.
        owners: Who has put it, the latest last.
        pins: The requests that need it, each with the end of its lease in seconds of the owner's clock.
    """

    data: bytes
    facts: PutResponse
    owners: dict[FileOwner, None] = field(default_factory=dict)
    pins: dict[Pin, float] = field(default_factory=dict)


class MediaStore:
    """Keeps files. Those that a request pins stay until it is released or its lease ends; others make room when it is
    needed, the longest unused first. It belongs to one event loop.

    Attributes:
        num_bytes: Of all files.
        num_pinned_bytes: Of those that are pinned.
    """

    def __init__(self, max_bytes: int, lease_seconds: float, clock: Callable[[], float]) -> None:
        """``clock``: seconds since no particular moment."""
        self._max_bytes = max_bytes
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._files: OrderedDict[bytes, MediaFile] = OrderedDict()  # used last: last
        self._requests: dict[Pin, set[bytes]] = {}
        self._leases: deque[tuple[float, bytes, Pin]] = deque()  # in the order of their ends
        self._held: Counter[str] = Counter()  # bytes of each tenant that are pinned, or arrive
        self._arriving = self._num_pins = 0
        self.num_bytes = self.num_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def arriving(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Keep room for a file while it arrives. Raises ``ResourceExhausted`` at once if the files of live requests
        leave none, or if the tenant would hold more than is free."""
        self._expire()
        free = self._max_bytes - self.num_pinned_bytes - self._arriving
        is_idle = free == self._max_bytes
        if num_bytes > free or (self._held[tenant] + num_bytes > free and not is_idle):
            raise errors.ResourceExhausted(
                "The files of the requests that are running fill the encoder's memory; retry.", retry_after=1.0
            )
        self._arriving += num_bytes
        self._held[tenant] += num_bytes
        try:
            self._make_room()
            yield
        finally:
            self._arriving -= num_bytes
            self._let_go(tenant, num_bytes)

    def put(self, owner: FileOwner, data: bytes, facts: PutResponse, request_id: str) -> None:
        """Keep a file, within :meth:`arriving`, and pin it for a request; empty: for none."""
        digest = facts.digest
        if (file := self._files.get(digest)) is None:
            file = self._files[digest] = MediaFile(data, facts)
            self.num_bytes += len(data)
        _add(owner, file)
        self._use(digest, file, owner, request_id)

    def find(self, owner: FileOwner, digest: bytes, request_id: str) -> PutResponse | None:
        """Return what is known of a file that this owner has put, and pin it; None: it is not there."""
        self._expire()
        file = self._files.get(digest)
        if file is None or owner not in file.owners:
            return None
        self._use(digest, file, owner, request_id)
        return file.facts

    def add_owner(self, owner: FileOwner, digest: bytes, request_id: str) -> PutResponse | None:
        """Do the same for an owner who has the file too, and has just shown it."""
        if (file := self._files.get(digest)) is not None:
            _add(owner, file)
        return self.find(owner, digest, request_id)

    def data(self, digest: bytes) -> bytes | None:
        """Return a file for an engine, which names it because a gateway does; None: it is not there."""
        self._expire()
        if (file := self._files.get(digest)) is None:
            return None
        self._files.move_to_end(digest)
        return file.data

    def release(self, pin: Pin) -> None:
        """End what a request pins."""
        for digest in self._requests.pop(pin, ()):
            self._unpin(digest, pin)

    def forget_unused(self) -> None:
        """Forget the files that no request pins."""
        self._expire()
        for digest in [digest for digest, file in self._files.items() if not file.pins]:
            self.num_bytes -= len(self._files.pop(digest).data)

    def _use(self, digest: bytes, file: MediaFile, owner: FileOwner, request_id: str) -> None:
        self._files.move_to_end(digest)
        if not request_id:
            return
        pin, ends_at = Pin(owner.tenant, request_id), self._clock() + self._lease_seconds
        if pin not in file.pins:
            if self._num_pins >= MAX_PINS:
                raise errors.ResourceExhausted(f"{MAX_PINS} files of requests are held; retry.", retry_after=1.0)
            self._num_pins += 1
            size = len(file.data)
            self.num_pinned_bytes += 0 if file.pins else size
            if not any(each.tenant == pin.tenant for each in file.pins):
                self._held[pin.tenant] += size
            self._requests.setdefault(pin, set()).add(digest)
        elif file.pins[pin] == ends_at:
            return
        file.pins[pin] = ends_at
        self._leases.append((ends_at, digest, pin))
        if len(self._leases) > 2 * MAX_PINS:  # most are of requests that were released
            live = ((end, name, each) for name, one in self._files.items() for each, end in one.pins.items())
            self._leases = deque(sorted(live))

    def _expire(self) -> None:
        now = self._clock()
        while self._leases and self._leases[0][0] <= now:
            ends_at, digest, pin = self._leases.popleft()
            file = self._files.get(digest)
            if file is not None and file.pins.get(pin) == ends_at:  # otherwise it was released, or extended
                self._requests[pin].discard(digest)
                if not self._requests[pin]:
                    del self._requests[pin]
                self._unpin(digest, pin)

    def _unpin(self, digest: bytes, pin: Pin) -> None:
        file = self._files[digest]
        if file.pins.pop(pin, None) is None:
            return
        self._num_pins -= 1
        size = len(file.data)
        self.num_pinned_bytes -= 0 if file.pins else size
        if not any(each.tenant == pin.tenant for each in file.pins):
            self._let_go(pin.tenant, size)

    def _let_go(self, tenant: str, num_bytes: int) -> None:
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _make_room(self) -> None:
        """Forget files that no request pins, until the others and those that arrive fit."""
        if self.num_bytes + self._arriving <= self._max_bytes:
            return
        for digest in [digest for digest, file in self._files.items() if not file.pins]:
            self.num_bytes -= len(self._files.pop(digest).data)
            if self.num_bytes + self._arriving <= self._max_bytes:
                return


def _add(owner: FileOwner, file: MediaFile) -> None:
    file.owners.pop(owner, None)
    file.owners[owner] = None
    if len(file.owners) > MAX_OWNERS:
        del file.owners[next(iter(file.owners))]
