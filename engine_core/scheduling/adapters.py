"""Keeps the LoRA adapters that requests may name: loads and forgets them, and counts the requests that use them.

A batch has at most ``max_loras`` adapters. A request whose adapter finds no slot is passed over by those behind it, but
only so often: then no other adapter's request begins until a slot is free for it. So every adapter gets its turn, even
if requests for the others never end.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..data.errors import ExecutorFailedError, WorkerLostError
from ..data.lora import LoraAnswer, LoraConfig, LoraErrorKind, LoraInfo, LoraState
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


class AdapterStore(Protocol):
    """Keeps adapters in the memory of the workers."""

    def load(self, path: str) -> LoraInfo:
        """Read the adapter in a directory. Raises ``ValueError`` naming what is wrong or not supported, and errors of
        the workers."""

    def drop(self, digest: bytes) -> None:
        """Forget an adapter that no request names any more. Workers that do not have it do nothing; the error of one
        that cannot forget it is not raised."""


@dataclass(slots=True)
class _InMemory:
    """An adapter in the workers' memory."""

    path: str
    rank: int


# The core owns the slots, and a step names all adapters in them by digest: scheduler and worker agree also after a
# failed step or with a new worker, and a name may mean other files after a replacement.
class Adapters:
    """Loads and forgets adapters. Belongs to the thread that steps the core."""

    def __init__(self, config: LoraConfig, store: AdapterStore) -> None:
        """Raises ``ValueError`` naming an option, or an adapter to load at start, that does not work."""
        self._store = store
        self._max_loaded = config.max_loaded
        self._digests: dict[str, bytes] = {}  # by name, the least recently used first
        self._memory: dict[bytes, _InMemory] = {}
        self._requests: Counter[bytes] = Counter()  # live ones
        self._unneeded: list[bytes] = []  # that the workers may still have; bounded by the adapters that were loaded
        self._slots = AdapterSlots(config.max_loras)
        self._states: list[LoraState] = []  # as they were reported last
        self._are_states_old = False
        for name, path in config.named_paths():
            if error := self.load(name, path).error:
                raise ValueError(f"lora_modules: {name}: {error}")

    def load(self, name: str, path: str, digest: bytes = b"", in_place: bool = False) -> LoraAnswer:
        """Let requests name the adapter in the directory ``path``.

        With a ``digest``, the files must have it. ``in_place`` replaces another adapter of this name, instead of
        failing; live requests keep that one.
        """
        ours = self._digests.get(name)
        if ours is not None and (digest == ours or not (digest or in_place or self._memory[ours].path != path)):
            return self.answer()
        if not name:
            return self._refuse(LoraErrorKind.INVALID, "name is empty")
        if len(self._memory) >= self._max_loaded and self._least_used() is None:
            error = f"{len(self._memory)} adapters are loaded (--max-cpu-loras), all pinned or in use"
            return self._refuse(LoraErrorKind.FULL, error)
        try:
            info = self._store.load(path)
        except ValueError as wrong:
            return self._refuse(LoraErrorKind.INVALID, str(wrong))
        if conflict := self._conflict("" if in_place else name, digest, info.digest):
            self._release(info.digest)
            self.drop_unneeded()
            return self._refuse(LoraErrorKind.CONFLICT, conflict)
        self._keep(name, path, info)
        self.drop_unneeded()
        return self.answer()

    def unload(self, name: str) -> LoraAnswer:
        """Let no new request name an adapter. Those that are live keep it."""
        if name not in self._digests:
            return self._refuse(LoraErrorKind.NOT_FOUND, f"no adapter {name!r} is loaded")
        self._forget(name)
        self.drop_unneeded()
        return self.answer()

    def pin(self, name: str, pinned: bool) -> LoraAnswer:
        """Keep an adapter in a slot and in memory, or end that."""
        if name not in self._digests:
            return self._refuse(LoraErrorKind.NOT_FOUND, f"no adapter {name!r} is loaded")
        if not pinned:
            self._slots.pinned.discard(self._digests[name])
        elif not self._slots.pin(self._digests[name]):
            return self._refuse(LoraErrorKind.FULL, "all slots but one are pinned (--max-loras)")
        return self.answer()

    def answer(self) -> LoraAnswer:
        """Return what is loaded."""
        self._are_states_old = True
        running = {state.digest: state.num_running for state in self._states}
        return LoraAnswer(self._list(running))

    def restore(self) -> None:
        """Load all adapters again, because the workers are new. One whose files have changed is forgotten: its requests
        fail when they would begin."""
        for digest, adapter in list(self._memory.items()):
            try:
                found = self._store.load(adapter.path).digest
            except WorkerLostError:
                raise
            except (ValueError, ExecutorFailedError):  # the other adapters, and the engine, go on without it
                found = b""
            if found != digest:
                del self._memory[digest]
                self._slots.drop(digest)
                self._digests = {name: each for name, each in self._digests.items() if each != digest}
                self._unneeded += [each for each in (digest, found) if each]  # what the workers have read all the same
        self._are_states_old = True
        self.resend_slots()

    def serves(self, digest: bytes) -> bool:
        """Return whether a new request may name this adapter."""
        return digest in self._digests.values()

    def added(self, request: Request) -> None:
        """Count a request that is live from now on."""
        self._requests[request.adapter] += 1
        self._are_states_old = True
        for name, digest in list(self._digests.items()):
            if digest == request.adapter:
                self._digests[name] = self._digests.pop(name)

    def ended(self, request: Request) -> None:
        """Stop counting a request, which has ended. :meth:`drop_unneeded` is to be called soon."""
        self._requests[request.adapter] -= 1
        self._are_states_old = True
        self._release(request.adapter)

    def drop_unneeded(self) -> None:
        """Let the workers forget the adapters that neither a name nor a live request needs.

        To be called between changes of requests, never within one: a call of the workers may be interrupted.
        """
        while self._unneeded:
            if self._unneeded[-1] not in self._memory:  # otherwise it was loaded again
                self._store.drop(self._unneeded[-1])
            self._unneeded.pop()  # only now: an interrupted call is made again

    def begin_step(self, running: Iterable[Request]) -> None:
        """Note which requests run before a step."""
        self._slots.begin_step(running if self._requests else ())

    def choose(self, heads: Sequence[Request]) -> Request | None:
        """Return the first of these requests that may begin, as :meth:`AdapterSlots.choose` says."""
        return self._slots.choose(heads, self._memory)

    def begins(self, request: Request) -> None:
        """Give a slot to the request that was chosen last, which begins in this step."""
        self._slots.begins(request)

    def is_lost(self, request: Request) -> bool:
        """Return whether the adapter of a live request is not loaded any more."""
        return bool(request.adapter) and request.adapter not in self._memory

    def take_slots(self) -> list[bytes] | None:
        """Return the adapters in the slots for the next step; None if they are those of the step before."""
        if not self._slots.have_changed:
            return None
        self._slots.have_changed = False
        return self._slots.digests

    def resend_slots(self) -> None:
        """Let the next step name all slots, because it is unknown which the workers have filled."""
        self._slots.have_changed = True

    def take_changes(self, running: Iterable[Request]) -> list[LoraState] | None:
        """Return the state of all adapters; None if it has not changed since the last call."""
        if not self._requests and not self._are_states_old:
            return None
        self._are_states_old = False
        states = self._list(Counter(request.adapter for request in running))
        if states == self._states:
            return None
        self._states = states
        return states

    def _list(self, running: "dict[bytes, int] | Counter[bytes]") -> list[LoraState]:
        return [
            LoraState(
                name=name,
                digest=digest,
                path=self._memory[digest].path,
                rank=self._memory[digest].rank,
                pinned=digest in self._slots.pinned,
                in_slot=digest in self._slots,
                num_waiting=max(0, self._requests[digest] - running.get(digest, 0)),
                num_running=running.get(digest, 0),
            )
            for name, digest in sorted(self._digests.items())
        ]

    def _refuse(self, kind: LoraErrorKind, error: str) -> LoraAnswer:
        answer = self.answer()
        answer.error, answer.kind = error, kind
        return answer

    def _conflict(self, name: str, wanted: bytes, found: bytes) -> str:
        if wanted and found != wanted:
            return f"the files have the digest {found.hex()}, not {wanted.hex()}"
        if self._digests.get(name, found) != found:
            return f"another adapter is loaded as {name!r}; unload it first"
        return ""

    def _least_used(self) -> str | None:
        """Return the name that was used least recently, of those whose adapters could be dropped."""
        counts = Counter(self._digests.values())
        for name, digest in self._digests.items():
            if counts[digest] == 1 and not self._requests[digest] and digest not in self._slots.pinned:
                return name
        return None

    def _keep(self, name: str, path: str, info: LoraInfo) -> None:
        """Give a name to an adapter that was read, in the place of the one that had it; make room for it."""
        if info.digest not in self._memory:
            if len(self._memory) >= self._max_loaded and (unused := self._least_used()) is not None:
                self._forget(unused)
            self._memory[info.digest] = _InMemory(path, info.rank)
        if self._digests.get(name, info.digest) != info.digest:
            self._forget(name)
        self._digests[name] = info.digest

    def _forget(self, name: str) -> None:
        digest = self._digests.pop(name)
        if not self.serves(digest):
            self._slots.pinned.discard(digest)
        self._release(digest)

    def _release(self, digest: bytes) -> None:
        """Forget an adapter if neither a name nor a live request needs it; the workers still have it."""
        if not self._requests[digest]:
            del self._requests[digest]
            if not self.serves(digest):
                self._memory.pop(digest, None)
                self._slots.drop(digest)
                self._unneeded.append(digest)
