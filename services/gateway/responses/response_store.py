"""Keeps responses for the requests that continue, read or cancel them."""

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


@dataclass(slots=True)
class StoredResponse:
    """Holds a response with its conversation, or a conversation object with its items as turns.

    Attributes:
        tenant: Name of the tenant that it belongs to.
        response: Its object, as clients see it.
        turns: The conversation: what it answered, and the answer once it is complete.
        session: Of its request; empty: the responses that continue it are of the session that it begins.
        cancel: Ends its generation; None once it has ended.
        token: Of the call that began it in the background, by which a repeat of the call is known.
        listed: The labels of the MCP servers whose tools the conversation lists.
    """

    tenant: str
    response: dict[str, Any]
    turns: Sequence[Turn]
    session: str = ""
    cancel: Callable[[], object] | None = None
    token: ResumeToken = NEW
    listed: frozenset[str] = frozenset()


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
            stored.token = running.stored.token
        self._end_running(response_id)
        size = len(encode_json(stored.response)) + len(encode_json(stored.turns))
        size += OBJECT_BYTES * (1 + len(stored.turns))
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        self._num_bytes -= shelf.pop(response_id)
        shelf.entries[response_id] = stored, size
        shelf.num_bytes += size
        self._num_bytes += size
        self._drop_surplus()

    def end(self, response_id: str, response: dict[str, Any]) -> None:
        """Keep how a response in the background ended without an answer, unless it was deleted meanwhile."""
        if (running := self._running.get(response_id)) is not None:
            self.put(StoredResponse(running.stored.tenant, response, running.stored.turns, running.stored.session))

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
        if stored.cancel is not None:
            stored.cancel()
        self._end_running(response_id)
        if (shelf := self._shelves.get(tenant)) is not None:
            self._num_bytes -= shelf.pop(response_id)
            if not shelf.entries:
                del self._shelves[tenant]

    def _end_running(self, response_id: str) -> None:
        if (running := self._running.pop(response_id, None)) is not None:
            running.release()

    def _drop_surplus(self) -> None:
        while self._num_bytes and self._num_bytes + self._running_bytes.taken > self._max_bytes:
            self._drop_one()

    def _drop_one(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].num_bytes)
        self._num_bytes -= shelf.pop(next(iter(shelf.entries)))
        if not shelf.entries:
            del self._shelves[tenant]
