"""Keeps responses for the requests that continue, read or cancel them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenloom.request import errors

from ..http.sse import encode_json
from .input_items import Turn

MAX_RUNNING = 256
"""Responses that may run in the background of one gateway."""


@dataclass(slots=True)
class StoredResponse:
    """Holds a response with its conversation.

    Attributes:
        tenant: Name of the tenant that it belongs to.
        response: Its object, as clients see it.
        turns: The conversation: what it answered, and the answer once it is complete.
        cancel: Ends its generation; None once it has ended.
    """

    tenant: str
    response: dict[str, Any]
    turns: Sequence[Turn]
    cancel: Callable[[], object] | None = None


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


class ResponseStore:
    """Holds the latest responses up to a number of bytes, and those that run in the background.

    The tenant with the most bytes loses its oldest response first, so that no tenant drops those of the others.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of the responses' JSON; 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._running: dict[str, StoredResponse] = {}
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def begin(self, stored: StoredResponse) -> None:
        """Keep a response that runs in the background. Raises :class:`errors.ResourceExhausted` for too many."""
        if len(self._running) >= MAX_RUNNING:
            raise errors.ResourceExhausted(f"{MAX_RUNNING} responses already run in the background; retry later")
        self._running[stored.response["id"]] = stored

    def put(self, stored: StoredResponse) -> None:
        """Keep a response that has ended; drop the oldest ones that do not fit with it."""
        response_id = stored.response["id"]
        self._running.pop(response_id, None)
        size = len(encode_json(stored.response)) + len(encode_json(stored.turns))
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        shelf.entries[response_id] = stored, size
        shelf.num_bytes += size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._drop_one()

    def end(self, response_id: str, response: dict[str, Any]) -> None:
        """Keep how a response in the background ended without an answer, unless it was deleted meanwhile."""
        if (stored := self._running.get(response_id)) is not None:
            self.put(StoredResponse(stored.tenant, response, stored.turns))

    def get(self, response_id: str, tenant: str, where: str | None = None) -> StoredResponse:
        """Return a tenant's response. Raises :class:`errors.NotFound`, which also covers those of other tenants.

        ``where``: the field that names it, for the error.
        """
        stored = self._running.get(response_id)
        if stored is None and (shelf := self._shelves.get(tenant)) is not None:
            stored, _ = shelf.entries.get(response_id, (None, 0))
        if stored is None or stored.tenant != tenant:
            message = f"no response {response_id[:64]!r} is stored here: it was not stored, dropped, or made elsewhere"
            raise errors.NotFound(message, field=where)
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        """Drop a tenant's response and end its generation. Raises :class:`errors.NotFound`."""
        stored = self.get(response_id, tenant)
        if stored.cancel is not None:
            stored.cancel()
        self._running.pop(response_id, None)
        if (shelf := self._shelves.get(tenant)) is not None:
            self._num_bytes -= shelf.pop(response_id)

    def _drop_one(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].num_bytes)
        self._num_bytes -= shelf.pop(next(iter(shelf.entries)))
        if not shelf.entries:
            del self._shelves[tenant]
