"""Keeps responses for the requests that continue, read or cancel them, and the events of those that stream."""

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tokenloom.request import errors
from tokenloom.request.limits import DividedLimit, Reservation

from ..encoding.sse import encode_json
from ..records.request_ids import NEW, ResumeToken
from .input_items import Turn

MAX_RUNNING = 256
"""Responses that may run in the background of one gateway, which its tenants divide."""
CONVERSATION = "conv_"
"""Begins the ids of conversations, which are kept like responses."""
OBJECT_BYTES = 500
"""Counts for each response, conversation and turn besides its JSON: what Python takes for a small one."""
MAX_DELETED = 4096
"""Ids of deleted responses that are remembered, so that none comes back from an output processor that still has it."""
EVENTS_PER_BLOCK = 64
_END = b"\n\n"
"""Ends an event."""


class EventLog:
    """Keeps the events of a response, numbered from 0 on as in their ``sequence_number``, for clients that read them
    again. Full blocks are compressed: an event takes some 200 bytes, and there is one for each word.

    Attributes:
        num_bytes: What the events take.
        is_over: Whether none will be added.
        error: Why it ended before the response did; None: it did not.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_over = False
        self.error: errors.TokenloomError | None = None
        self._blocks: list[bytes] = []
        self._open: list[bytes] = []  # the last events, fewer than a block has
        self._changed: asyncio.Event | None = None  # set with the next event; None: no reader waits

    def add(self, events: bytes) -> None:
        """Add any number of complete events, unless it is over."""
        if not events or self.is_over:
            return
        for event in events.split(_END)[:-1]:
            self._open.append(event + _END)
            self.num_bytes += len(self._open[-1])
            if len(self._open) == EVENTS_PER_BLOCK:
                block = b"".join(self._open)
                self._blocks.append(zlib.compress(block, 1))
                self.num_bytes += len(self._blocks[-1]) - len(block)
                self._open = []
        self._wake()

    def end(self, error: errors.TokenloomError | None = None) -> None:
        """Add no more. Only the first call counts."""
        if not self.is_over:
            self.is_over, self.error = True, error
            self._wake()

    def read(self, first: int) -> list[bytes]:
        """Return the events from a number on, up to a block of them; empty if there are none yet."""
        number, at = divmod(first, EVENTS_PER_BLOCK)
        if number > len(self._blocks):
            return []
        if number == len(self._blocks):
            return self._open[at:]
        events = zlib.decompress(self._blocks[number]).split(_END)[at:-1]
        return [event + _END for event in events]

    async def more(self) -> None:
        """Return when something was added, or it is over."""
        if self.is_over:
            return
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


@dataclass(slots=True)
class StoredResponse:
    """Holds a response with its conversation, or a conversation object with its items as turns.

    Attributes:
        tenant: Name of the tenant that it belongs to.
        response: Its object, as clients see it.
        turns: The conversation: what it answered, and the answer once it is complete.
        session: Of its request; empty: the responses that continue it are of the session that it begins.
        task: Generates it; None once it has ended.
        token: Of the call that began it in the background, by which a repeat of the call is known.
        listed: The labels of the MCP servers whose tools the conversation lists.
        log: Its events, if it was begun in the background as a stream.
        withdraw: Ends its generation wherever it runs, and lets no output processor keep it; None: none does.
    """

    tenant: str
    response: dict[str, Any]
    turns: Sequence[Turn]
    session: str = ""
    task: "asyncio.Task[None] | None" = None
    token: ResumeToken = NEW
    listed: frozenset[str] = frozenset()
    log: EventLog | None = None
    withdraw: Callable[[], object] | None = None


@dataclass(slots=True)
class _Shelf:
    """Holds the ended responses of one tenant, the oldest first, with the size of each."""

    entries: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def pop(self, response_id: str) -> int:
        """Drop a response and return its size; 0 if it is not there."""
        _, size = self.entries.pop(response_id, (None, 0))
        self.num_bytes -= size
        return size


@dataclass(slots=True)
class _Running:
    """Holds a response that runs in the background, with its place and the bytes of its conversation."""

    stored: StoredResponse
    place: Reservation
    bytes: Reservation

    def release(self) -> None:
        self.place.release()
        self.bytes.release()


class ResponseStore:
    """Holds the latest responses up to a number of bytes, and those that run in the background.

    The tenant with the most bytes loses its oldest response first, so that no tenant drops those of the others; and
    tenants divide what may run in the background, so that none refuses those of the others.
    """

    def __init__(self, max_bytes: int, *, is_shared: bool = True) -> None:
        """``max_bytes``: of the responses' JSON, with :data:`OBJECT_BYTES`; 0: nothing is kept. ``is_shared``: the
        gateway has several tenants."""
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._running: dict[str, _Running] = {}
        self._places = DividedLimit(MAX_RUNNING, is_divided=is_shared)
        self._running_bytes = DividedLimit(max_bytes, is_divided=is_shared)
        self._num_bytes = 0
        self._deleted: OrderedDict[tuple[str, str], None] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def begin(self, stored: StoredResponse) -> None:
        """Keep a response that runs in the background. Raises :class:`errors.ResourceExhausted` if so many run already,
        of all tenants or of this one, or if their conversations take so many bytes."""
        size = len(encode_json(stored.turns))
        own = [running for running in self._running.values() if running.stored.tenant == stored.tenant]
        # Divided among tenants: one of them took all places of responses in the background, and their conversations
        # counted against no bound.
        if (place := self._places.take(1, len(own))) is None:
            message = f"{self._places.taken} responses run in the background, {len(own)} of them yours; retry later"
            raise errors.ResourceExhausted(message)
        num_bytes = self._running_bytes.take(size, sum(running.bytes.amount for running in own))
        if num_bytes is None:
            place.release()
            raise errors.ResourceExhausted("the responses that run in the background hold too many bytes; retry later")
        self._running[stored.response["id"]] = _Running(stored, place, num_bytes)
        self._drop_surplus()

    def repeated(self, token: ResumeToken, tenant: str) -> StoredResponse | None:
        """Return the response in the background that an earlier call with the same key has begun; None if there is
        none, or it has ended without an answer. Raises ``BodyChanged`` if that call had another body."""
        if not token.takes_over:
            return None
        found = next((each for each in self._of(tenant) if each.token.request_id == token.request_id), None)
        if found is None or found.response["status"] in ("failed", "cancelled"):
            return None
        if found.token.fingerprint != token.fingerprint:
            raise errors.BodyChanged("The body differs from the body that this response was begun with.")
        return found

    def _of(self, tenant: str) -> Iterator[StoredResponse]:
        """Yield the responses of a tenant, the latest first."""
        yield from (each.stored for each in reversed(self._running.values()) if each.stored.tenant == tenant)
        if (shelf := self._shelves.get(tenant)) is not None:
            yield from (stored for stored, _ in reversed(shelf.entries.values()))

    def put(self, stored: StoredResponse) -> None:
        """Keep a response that has ended; drop the oldest ones that do not fit with it."""
        response_id = stored.response["id"]
        if (running := self._running.get(response_id)) is not None:
            begun = running.stored
            stored.token, stored.log, stored.withdraw = begun.token, begun.log, begun.withdraw
        self._end_running(response_id)
        size = 0 if stored.log is None else stored.log.num_bytes
        size += len(encode_json(stored.response)) + len(encode_json(stored.turns))
        size += OBJECT_BYTES * (1 + len(stored.turns))
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        self._num_bytes -= shelf.pop(response_id)
        shelf.entries[response_id] = stored, size
        shelf.num_bytes += size
        self._num_bytes += size
        self._drop_surplus()

    def recount(self, response_id: str, tenant: str) -> None:
        """Count a response again that is kept, and whose log got its last events after that."""
        shelf = self._shelves.get(tenant)
        if shelf is not None and response_id in shelf.entries:
            self.put(shelf.entries[response_id][0])

    def end(self, response_id: str, response: dict[str, Any]) -> None:
        """Keep how a response in the background ended without an answer, unless it was deleted meanwhile."""
        if (running := self._running.get(response_id)) is not None:
            self.put(StoredResponse(running.stored.tenant, response, running.stored.turns, running.stored.session))

    def forget(self, response_id: str) -> None:
        """Forget a response in the background that another gateway has taken over."""
        self._end_running(response_id)

    def knows(self, response_id: str, tenant: str) -> bool:
        """Return whether a response of a tenant is kept here, or was deleted."""
        shelf = self._shelves.get(tenant)
        is_kept = response_id in self._running or (shelf is not None and response_id in shelf.entries)
        return is_kept or self.was_deleted(response_id, tenant)

    def was_deleted(self, response_id: str, tenant: str) -> bool:
        """Return whether a tenant has deleted a response here."""
        return (tenant, response_id) in self._deleted

    def get(self, response_id: str, tenant: str, where: str | None = None) -> StoredResponse:
        """Return a tenant's response. Raises :class:`errors.NotFound`, which also covers those of other tenants.

        ``where``: the field that names it, for the error.
        """
        running = self._running.get(response_id)
        stored = None if running is None else running.stored
        if stored is None and (shelf := self._shelves.get(tenant)) is not None:
            stored, _ = shelf.entries.get(response_id, (None, 0))
        if stored is None or stored.tenant != tenant:
            kind = "conversation" if response_id.startswith(CONVERSATION) else "response"
            message = f"no {kind} {response_id[:64]!r} is stored here: it was not stored, dropped, or made elsewhere"
            raise errors.NotFound(message, field=where)
        return stored

    def append(self, conversation: str, tenant: str, items: Sequence[dict[str, Any]]) -> None:
        """Add items, at least one, to a conversation, unless it was dropped meanwhile or has them: the items of a call
        that its client repeats have the same ids."""
        try:
            stored = self.get(conversation, tenant)
        except errors.NotFound:
            return
        if all(item["id"] != items[-1]["id"] for item in stored.turns):
            self.put(replace(stored, turns=[*stored.turns, *items]))

    def delete(self, response_id: str, tenant: str) -> None:
        """Drop a tenant's response and end its generation. Raises :class:`errors.NotFound`."""
        stored = self.get(response_id, tenant)
        if stored.task is not None:
            stored.task.cancel()
        self._deleted[tenant, response_id] = None
        if len(self._deleted) > MAX_DELETED:
            self._deleted.popitem(last=False)
        self._end_running(response_id)
        if (shelf := self._shelves.get(tenant)) is not None:
            self._num_bytes -= shelf.pop(response_id)
            if not shelf.entries:
                del self._shelves[tenant]

    def _end_running(self, response_id: str) -> None:
        if (running := self._running.pop(response_id, None)) is not None:
            running.release()

    def _drop_surplus(self) -> None:
        logs = (running.stored.log for running in self._running.values())
        in_work = self._running_bytes.taken + sum(log.num_bytes for log in logs if log is not None)
        while self._num_bytes and self._num_bytes + in_work > self._max_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].num_bytes)
        self._num_bytes -= shelf.pop(next(iter(shelf.entries)))
        if not shelf.entries:
            del self._shelves[tenant]
