"""Decides which LoRA adapters occupy slots of the device.

A batch has at most ``max_loras`` adapters. A request whose adapter finds no slot is passed over by those behind it, but
only so often: then no other adapter's request begins until a slot is free for it. So every adapter gets its turn, even
if requests for the others never end.
"""

from collections.abc import Collection, Iterable, Sequence

from ..data.request import Request

# A batch is not emptied for each new adapter, which would cost tokens/s, and none waits for ever: after so many passes
# other adapters pause until a slot is free. Requests for the base model go on.
MAX_PASSES = 64
"""How many requests may pass over a request that waits for a slot."""


class AdapterSlots:
    """Assigns the slots to the adapters of running requests."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._slots: dict[bytes, None] = {}  # the least recently used first
        self._running: set[bytes] = set()
        self._passed: list[Request] = []  # by the request that was chosen last
        self.pinned: set[bytes] = set()
        self.have_changed = False
        """Whether the workers do not know the present slots."""

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    @property
    def digests(self) -> list[bytes]:
        """The adapters in the slots."""
        return list(self._slots)

    def begin_step(self, running: Iterable[Request]) -> None:
        """Note which requests run before the step."""
        self._running = {request.adapter for request in running if request.adapter}

    def choose(self, heads: Sequence[Request], loaded: Collection[bytes]) -> Request | None:
        """Return the first of these requests that may begin; None if none may.

        ``heads`` are in the order in which they should begin. One whose adapter is not ``loaded`` any more needs no
        slot: the caller ends it.
        """
        owed = next((head for head in heads if self._is_owed(head)), None)
        self._passed = []
        for head in heads:
            # An unloaded adapter counts as fitting: its request has to reach the caller to be ended, or it would block
            # its queue.
            if not head.adapter or head.adapter not in loaded or self._fits(head, owed):
                return head
            self._passed.append(head)
        return None

    def begins(self, request: Request) -> None:
        """Give a slot to the request that was chosen last, which begins in this step."""
        for passed in self._passed:
            passed.num_passed += 1
        if request.adapter:
            self._running.add(request.adapter)
            self._occupy(request.adapter)

    def pin(self, digest: bytes) -> bool:
        """Keep an adapter in a slot, from when one is free. Returns False if no slot would be left for the others."""
        if len(self.pinned | {digest}) >= self._max_loras:
            return False
        self.pinned.add(digest)
        if self._has_room(digest):
            self._occupy(digest)
        return True

    def drop(self, digest: bytes) -> None:
        """Free the slot of an adapter, which no request names any more."""
        self._slots.pop(digest, None)
        self.pinned.discard(digest)

    def _is_owed(self, head: Request) -> bool:
        return head.num_passed >= MAX_PASSES and head.adapter not in self._running

    def _fits(self, head: Request, owed: Request | None) -> bool:
        if owed is not None and head.adapter != owed.adapter:
            return False
        return head.adapter in self._running or self._has_room(head.adapter)

    def _has_room(self, digest: bytes) -> bool:
        return len(self._running | self.pinned | {digest}) <= self._max_loras

    def _occupy(self, digest: bytes) -> None:
        if digest not in self._slots:
            if len(self._slots) == self._max_loras:
                kept = self._running | self.pinned
                del self._slots[next(each for each in self._slots if each not in kept)]
            self.have_changed = True
        self._slots[digest] = self._slots.pop(digest, None)
