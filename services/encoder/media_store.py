"""Keeps the files of requests by their digests, up to a number of bytes: images in memory, sounds on disk."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tokenloom.request import errors
from tokenloom.v1.encoder_pb2 import PutResponse

MAX_OWNERS = 256
"""Of one file: a client may vary the salts of its requests without end."""
MAX_PINS = 1 << 16
"""Files of live requests, each counted for each request."""


Data = TypeVar("Data", bound=Sized)


class FileOwner(NamedTuple):
    """Says who may ask for a file: what one tenant has put does not show to another one."""

    tenant: str
    salt: bytes


class Pin(NamedTuple):
    """Names a request that needs a file."""

    tenant: str
    request_id: str


@dataclass(slots=True)
class MediaFile(Generic[Data]):
    """Holds one file.

    Attributes:
        data: Its length is what it takes, in bytes.
        facts: What ``Put`` answers.
        owners: Who has put it, the latest last.
        pins: The requests that need it, each with the end of its lease in seconds of the owner's clock.
    """

    data: Data
    facts: PutResponse
    owners: dict[FileOwner, None] = field(default_factory=dict)
    pins: dict[Pin, float] = field(default_factory=dict)


class Room:
    """Holds room for a file that arrives."""

    def __init__(self, store: "MediaStore[Any]", tenant: str) -> None:
        self._store, self._tenant = store, tenant
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Hold so many bytes, at least as many as before. Raises ``ResourceExhausted`` if the files of live requests
        leave less, or the tenant would hold more than is free, and ``PayloadTooLarge`` if there never is so much."""
        if num_bytes > self.num_bytes:
            self._store.reserve(self._tenant, num_bytes - self.num_bytes, self.num_bytes)
            self.num_bytes = num_bytes


class MediaStore(Generic[Data]):
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
        self._files: OrderedDict[bytes, MediaFile[Data]] = OrderedDict()  # used last: last
        self._requests: dict[Pin, set[bytes]] = {}
        self._leases: deque[tuple[float, bytes, Pin]] = deque()  # in the order of their ends
        self._held: Counter[str] = Counter()  # bytes of each tenant that are pinned, or arrive
        self._arriving = self._num_pins = 0
        self.num_bytes = self.num_pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._files)

    @contextmanager
    def arriving(self, tenant: str, num_bytes: int) -> Iterator[Room]:
        """Keep room for a file while it arrives, which may turn out to need more. Raises as :meth:`Room.grow_to`."""
        room = Room(self, tenant)
        try:
            room.grow_to(num_bytes)
            yield room
        finally:
            self._arriving -= room.num_bytes
            self._let_go(tenant, room.num_bytes)

    def reserve(self, tenant: str, num_bytes: int, own: int) -> None:
        """Keep room for more of a file that holds ``own`` bytes. Raises as :meth:`Room.grow_to`."""
        self.expire()
        free = self._max_bytes - self.num_pinned_bytes - self._arriving
        is_alone = free + own == self._max_bytes
        if num_bytes > free and is_alone:
            raise errors.PayloadTooLarge(
                f"The file takes more than the {self._max_bytes:,} bytes that there are for all."
            )
        if num_bytes > free or (self._held[tenant] + num_bytes > free + own and not is_alone):
            raise errors.ResourceExhausted(
                "The files of the requests that are running leave no room at the encoder; retry.", retry_after=1.0
            )
        self._arriving += num_bytes
        self._held[tenant] += num_bytes
        self._make_room()

    def put(self, owner: FileOwner, data: Data, facts: PutResponse, request_id: str, name: bytes = b"") -> None:
        """Keep a file, within :meth:`arriving`, and pin it for a request; empty: for none. ``name``: by which it is
        found, if that is not its digest."""
        digest = name or facts.digest
        if (file := self._files.get(digest)) is None:
            file = self._files[digest] = MediaFile(data, facts)
            self.num_bytes += len(data)
        _add(owner, file)
        self._use(digest, file, owner, request_id)

    def find(self, owner: FileOwner, digest: bytes, request_id: str) -> PutResponse | None:
        """Return what is known of a file that this owner has put, and pin it; None: it is not there."""
        self.expire()
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

    def data(self, digest: bytes) -> Data | None:
        """Return a file for an engine, which names it because a gateway does; None: it is not there. The leases of its
        requests begin anew: one that transcribes hours asks for piece after piece."""
        self.expire()
        if (file := self._files.get(digest)) is None:
            return None
        self._files.move_to_end(digest)
        ends_at = self._clock() + self._lease_seconds
        for pin in file.pins:
            self._lease(digest, file, pin, ends_at)
        return file.data

    def release(self, pin: Pin) -> None:
        """End what a request pins."""
        for digest in self._requests.pop(pin, ()):
            self._unpin(digest, pin)

    def forget_unused(self) -> None:
        """Forget the files that no request pins."""
        self.expire()
        for digest in [digest for digest, file in self._files.items() if not file.pins]:
            self.num_bytes -= len(self._files.pop(digest).data)

    def _use(self, digest: bytes, file: MediaFile[Data], owner: FileOwner, request_id: str) -> None:
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
        self._lease(digest, file, pin, ends_at)

    def _lease(self, digest: bytes, file: MediaFile[Data], pin: Pin, ends_at: float) -> None:
        if file.pins.get(pin) == ends_at:
            return
        file.pins[pin] = ends_at
        self._leases.append((ends_at, digest, pin))
        if len(self._leases) > 2 * MAX_PINS:  # most are of requests that were released
            live = ((end, name, each) for name, one in self._files.items() for each, end in one.pins.items())
            self._leases = deque(sorted(live))

    def expire(self) -> None:
        """End the pins whose leases are over."""
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


def _add(owner: FileOwner, file: MediaFile[Any]) -> None:
    file.owners.pop(owner, None)
    file.owners[owner] = None
    if len(file.owners) > MAX_OWNERS:
        del file.owners[next(iter(file.owners))]
