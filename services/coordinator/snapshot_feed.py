"""Makes what watchers are sent, once for all of them: everything for a new watcher, and then what changes. Keeps the
messages that the watchers of one kind get. No I/O."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tokenloom.services.runtime.registry.engine_loads import clear_load
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineIdentity,
    EngineReport,
    PrefixPlacements,
    Snapshot,
    WatchRequest,
)

from .engines.engine_registry import Registry

MAX_ROWS_PER_SECOND = 1750
"""Loads, of some 55 bytes, that a watcher is sent at most: of more than 175 engines they are published less often than
everything else."""

MAX_STATE_MESSAGES_PER_SECOND = 2500
"""Messages that the watchers without loads, one in each engine, get at most together."""

_JOINING_FACTOR = 10
"""While engines join a new coordinator, so many times fewer messages are sent: each change would be one engine among a
thousand, watchers keep the complete view that they have, and the joins need the processor's time."""


MAX_KEPT = 16
"""Changes kept for watchers that are late by a few; one that is later gets everything again."""


_WOKEN_TOGETHER = 4
"""Watchers that a change wakes in one turn of the event loop. A message to two hundred takes 10 to 60 ms to write,
in which no pick would be answered otherwise; 16 took up to 7 ms where other programs wanted the cores too."""


SLICE_ENGINES = 128
"""Engines that are looked at in one turn of the event loop: to see what has changed of a thousand took 22 ms, to make
their loads or their whole entries part of a message 2 and 10, and twice as long where picks had pushed the code out of
the caches."""


class Published(NamedTuple):
    """Holds a serialized ``Snapshot``."""

    revision: int
    data: bytes


class ChangeLog:
    """Keeps the latest changes, each of which begins at the revision where the one before ended.

    Attributes:
        revision: The one at which the last change ended.
    """

    def __init__(
        self,
        revision: int,
        whole: Callable[[int], bytes],
        *,
        prepared: Callable[[], Iterable[None]] = tuple,
        max_kept: int = MAX_KEPT,
    ) -> None:
        """``whole`` returns a message with everything there is now, under the given revision. ``prepared`` makes that
        short, in slices. ``max_kept``: changes kept; 0 for watchers that get everything each time."""
        self.revision = revision
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._whole = whole
        self._prepared = prepared
        self._kept: deque[tuple[int, Published]] = deque(maxlen=max_kept)  # with the revision that each one changes

    def add(self, revision: int, data: bytes) -> None:
        """Publish a change of the last revision."""
        self._kept.append((self.revision, Published(revision, data)))
        self.revision = revision
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._wake(iter(waiting))

    async def changed(self) -> None:
        """Wait for the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    def after(self, revision: int | None) -> Sequence[Published]:
        """Return what a watcher at ``revision`` lacks: changes, or everything if it has nothing or lacks too much."""
        changes = self._changes(revision)
        return (Published(self.revision, self._whole(self.revision)),) if changes is None else changes

    def prepared(self, revision: int | None) -> Iterator[None]:
        """Prepare what :meth:`after` will return. Yields between slices of work."""
        if self._changes(revision) is None:
            yield from self._prepared()

    def _changes(self, revision: int | None) -> Sequence[Published] | None:
        """Return the changes that a watcher lacks; None: they are not kept any more."""
        if revision == self.revision:
            return ()
        # The kept changes must begin at exactly the watcher's revision: applied to another one, absolute values would
        # still leave out the engines that changed between the two.
        changes = [published for base, published in self._kept if revision is not None and base >= revision]
        return changes if changes and self._kept[-len(changes)][0] == revision else None

    def _wake(self, waiting: Iterator["asyncio.Future[None]"]) -> None:
        """Wake some of those that wait now, and the others in later turns of the event loop."""
        woken = list(islice(waiting, _WOKEN_TOGETHER))
        for waiter in woken:
            if not waiter.done():  # otherwise its watcher is gone
                waiter.set_result(None)
        if len(woken) == _WOKEN_TOGETHER:
            # With all of 200 watchers woken at once, turns of the loop were late by 0.19 s in 5 s of 10,000 picks a
            # second; spread over turns it was 0.04 to 0.06 s.
            asyncio.get_running_loop().call_soon(self._wake, waiting)


@dataclass(slots=True)
class _Shown:
    """An engine as the watchers know it, or will know it after the next change.

    Attributes:
        number: Stands for it in changes.
        rest: Its entry without the load.
        outline: What watchers without loads are shown, as a part of a serialized ``Snapshot``.
        data: Its entry as a part of a serialized ``Snapshot``; None: not serialized since it changed.
        bare: The same without its identity.
    """

    number: int
    rest: EngineEntry
    outline: bytes
    data: bytes | None = None
    bare: bytes | None = None


class _Pending:
    """What the watchers of one kind were not sent yet.

    Attributes:
        changed: Engines to send, each with whether its identity is new.
        left: Engines that left.
        constants: What seldom changes, as they were sent it.
    """

    def __init__(self, constants: tuple[bool, int, int, int, int]) -> None:
        self.changed: dict[str, bool] = {}
        self.left: dict[str, None] = {}
        self.constants = constants

    def change(self, name: str, *, is_new: bool) -> None:
        self.changed[name] = is_new or self.changed.get(name, False)

    def leave(self, name: str) -> None:
        self.changed.pop(name, None)
        self.left[name] = None


class SnapshotFeed:
    """Publishes the registry.

    Serialized parts of a ``Snapshot`` make a whole one when they are joined, as the encoding of Protocol Buffers
    defines it: engines are serialized when they change, not for each message.
    """

    def __init__(self, registry: Registry, slice_engines: int = SLICE_ENGINES) -> None:
        self._registry = registry
        self._slice_engines = slice_engines
        self._shown: dict[str, _Shown] = {}
        self._unseen: dict[str, None] = {}  # engines that joined, left or changed, and were not looked at yet
        self._num_joined = 0
        self._pending, self._pending_states = _Pending(self._constants()), _Pending(self._constants())
        self._loads: dict[str, None] = {}  # engines of which only the load is to be sent
        self._preparing: dict[str, None] | None = None  # those of a message that is made in slices now
        self._loads_at = self._states_at = self._others_at = 0.0
        self._was_complete = False
        self._body: bytes | None = None  # all engines, serialized
        self._outlines: bytes | None = None  # the same for watchers without loads
        self._everything = ChangeLog(registry.revision, self._whole, prepared=self.serialized)
        self._without_loads = ChangeLog(registry.revision, self._whole_outlines)
        self._uncut = ChangeLog(registry.revision, self._whole, prepared=self.serialized, max_kept=0)

    def log(self, request: WatchRequest) -> ChangeLog:
        """Return the messages for a watcher. The first one shows what the registry has now."""
        self._look_at_changes()
        if request.without_loads:
            return self._without_loads
        return self._everything if request.changes else self._uncut

    def publish(self, now: float) -> None:
        """Make a message of what has changed, if anything; ``now``: seconds of any clock."""
        for _ in self.slices(now):
            pass

    def slices(self, now: float) -> Iterator[None]:
        """Do what :meth:`publish` does, once a tick. Yields after each slice of work, between which anything else may
        happen."""
        with_loads = now >= self._loads_at and self._preparing is None
        while self._look_at_changes(self._slice_engines):
            yield
        if with_loads:
            self._note_loads(self._registry.changed.take_loads())
        are_joining = self._are_joining(now)
        wait = len(self._shown) / MAX_STATE_MESSAGES_PER_SECOND
        if now >= self._states_at and (others := self._others(self._pending_states, self._outline)):
            self._states_at = now + wait * (_JOINING_FACTOR if are_joining else 1)
            self._add(self._without_loads, others)
        if now < self._others_at:
            return
        self._others_at = now + wait * are_joining
        loads = (yield from self._loads_and_placements()) if with_loads else b""
        others = self._others(self._pending, self._part)
        if loads:
            others += loads
            # A row of loads takes 29 bytes and 9 µs; an entry with its identity has 290 bytes. So loads go as columns,
            # and identities only when they change.
            self._loads_at = now + len(self._shown) / MAX_ROWS_PER_SECOND
        if others:
            self._add(self._everything, others)
            self._add(self._uncut, b"")

    def _are_joining(self, now: float) -> bool:
        """Return whether engines join a new coordinator. When they have, everything is due."""
        is_complete = self._registry.is_complete
        if is_complete and not self._was_complete:
            self._states_at = self._others_at = now
        self._was_complete = is_complete
        return not is_complete

    def _others(self, pending: _Pending, part: Callable[[str, bool], bytes]) -> bytes:
        """Return what is pending, as a part of a message, and forget it; empty if nothing is.

        ``part``: returns an engine, with its identity or without, as a part of a message.
        """
        constants = self._constants()
        if not (pending.changed or pending.left or pending.constants != constants):
            return b""
        head = Snapshot(left=pending.left, complete=constants[0])
        if pending.constants[4] != constants[4]:
            head.new_encoders = True
            head.encoders.extend(self._registry.encoders.entries)
        if pending.constants[3] != constants[3]:
            head.desired.CopyFrom(self._registry.wanted.whole())
        if pending.constants[2] != constants[2]:
            head.new_adapters = True
            head.adapters.extend(self._registry.adapters)
            head.unloaded_adapters.extend(self._registry.adapters.unloaded)
        changed, pending.changed, pending.left, pending.constants = pending.changed, {}, {}, constants
        return head.SerializeToString() + b"".join(part(name, new) for name, new in changed.items())

    def _look_at_changes(self, most: int | None = None) -> bool:
        """See what has become of the engines that joined, left, or changed in more than their load; of ``most``
        at most. Returns whether there are more."""
        unseen = self._unseen
        unseen.update(dict.fromkeys(self._registry.changed.take_others()))
        for name in list(islice(unseen, most)):
            del unseen[name]
            self._body = self._outlines = None
            before, entry = self._shown.get(name), self._registry.entry(name)
            if entry is not None:
                self._see(name, before, entry)
            elif before is not None:
                del self._shown[name]
                self._forget_load(name)
                self._pending.leave(name)
                self._pending_states.leave(name)
        return bool(unseen)

    def _see(self, name: str, before: _Shown | None, entry: EngineEntry) -> None:
        if before is None:
            self._num_joined += 1
        # Numbers are never reused: a watcher that missed a departure would give the loads of one engine to another.
        entry.number = before.number if before else self._num_joined
        data = Snapshot(engines=[entry]).SerializeToString()
        clear_load(entry)
        shown = self._shown[name] = _Shown(entry.number, entry, _outline(entry), data)
        if before is None or shown.outline != before.outline:
            self._pending_states.change(name, is_new=True)
        if before is None or entry != before.rest:
            is_new = before is None or entry.identity != before.rest.identity
            self._pending.change(name, is_new=is_new)
            self._forget_load(name)
            if not is_new:
                shown.bare = self._bare(name)
        elif name not in self._pending.changed:
            self._loads[name] = None

    def _forget_load(self, name: str) -> None:
        """Do not send a load: all of the engine is sent, or nothing."""
        self._loads.pop(name, None)
        if self._preparing is not None:
            self._preparing.pop(name, None)

    def _note_loads(self, names: Iterable[str]) -> None:
        """Note that the loads of these engines changed, and nothing else."""
        for name in names:
            shown = self._shown[name]
            self._body = shown.data = shown.bare = None
            if name not in self._pending.changed:
                self._loads[name] = None

    def _entry(self, name: str) -> EngineEntry:
        """Return what is sent of an engine."""
        entry = self._registry.entry(name)
        assert entry is not None  # one that left was looked at
        entry.number = self._shown[name].number
        return entry

    def _part(self, name: str, with_identity: bool) -> bytes:
        """Return a part of a message with one engine."""
        shown = self._shown[name]
        if not with_identity:
            return shown.bare if shown.bare is not None else self._bare(name)
        if shown.data is None:
            shown.data = Snapshot(engines=[self._entry(name)]).SerializeToString()
        return shown.data

    def _bare(self, name: str) -> bytes:
        entry = self._entry(name)
        entry.ClearField("identity")
        return Snapshot(engines=[entry]).SerializeToString()

    def _outline(self, name: str, with_identity: bool) -> bytes:
        """Return a part of a message to watchers without loads; what it has of the identity is small."""
        return self._shown[name].outline

    def _add(self, log: ChangeLog, body: bytes) -> None:
        revision = max(self._registry.revision, log.revision + 1)
        log.add(revision, self._head(revision, log.revision) + body)

    def _whole(self, revision: int) -> bytes:
        self._look_at_changes()  # one that has left since has no entry any more
        if self._body is None:
            self._body = b"".join(self._part(name, True) for name in self._shown)
        placements = self._placements(self._registry.popular.all())
        return self._head(revision) + self._wanted() + self._body + placements

    def _loads_and_placements(self) -> Generator[None, None, bytes]:
        """Return what is pending of loads and of popular prefixes, as a part of a message, and forget it."""
        names, self._loads = self._loads, {}
        self._preparing, parts, num_made = names, list[bytes](), 0
        try:
            for some in self._in_slices(names):
                if parts:
                    yield
                    self._look_at_changes()
                still = [name for name in some if name in names]
                num_made += len(still)
                parts.append(self._loads_part(still))
        finally:
            self._preparing = None
        if num_made > len(names):
            # A watcher that is sent the load of an engine that has left meanwhile would ask for everything again; and
            # the load of one that was shown as a whole meanwhile is older than that.
            parts = [self._loads_part(names)]
        # Columns of several parts that are joined are those of one message.
        return b"".join(parts) + self._placements(self._registry.popular.take_changed())

    def _in_slices(self, names: Iterable[str]) -> Iterator[Sequence[str]]:
        order = list(names)
        for begin in range(0, len(order), self._slice_engines):
            yield order[begin : begin + self._slice_engines]

    def _loads_part(self, names: Collection[str]) -> bytes:
        loads = self._registry.loads({name: self._shown[name].number for name in names})
        return Snapshot(loads=loads).SerializeToString() if names else b""

    def serialized(self) -> Iterator[None]:
        """Serialize what a message with everything needs. Yields between slices of work."""
        if self._body is not None:
            return
        for number, some in enumerate(self._in_slices(self._shown)):
            if number:
                yield
            self._look_at_changes()
            for name in some:
                if name in self._shown:
                    self._part(name, True)

    def _placements(self, prefixes: Iterable[tuple[int, Sequence[str]]]) -> bytes:
        """Return beginnings of prompts with those of their engines that are shown, as a part of a message."""
        columns = PrefixPlacements()
        for block_hash, names in prefixes:
            numbers = [self._shown[name].number for name in names if name in self._shown]
            if numbers:
                columns.block_hash.append(block_hash)
                columns.engine.append(numbers[0])
                columns.other_engine.append(numbers[1] if len(numbers) > 1 else 0)
        return Snapshot(prefixes=columns).SerializeToString() if columns.block_hash else b""

    def _whole_outlines(self, revision: int) -> bytes:
        if self._outlines is None:
            self._outlines = b"".join(shown.outline for shown in self._shown.values())
        return self._head(revision) + self._wanted() + self._outlines

    def _wanted(self) -> bytes:
        """Return what operators want, and the encoders, as a part of a message."""
        wanted, state = self._registry.adapters, self._registry.wanted.whole()
        encoders = self._registry.encoders.entries
        return Snapshot(
            adapters=wanted, unloaded_adapters=wanted.unloaded, desired=state, encoders=encoders
        ).SerializeToString()

    def _head(self, revision: int, base_revision: int = 0) -> bytes:
        return Snapshot(
            coordinator_epoch=self._registry.epoch,
            revision=revision,
            complete=self._registry.is_complete,
            pd_threshold=self._registry.pd_threshold,
            placement=self._registry.placement,
            mixes_numerics=self._registry.mixes_numerics,
            base_revision=base_revision,
        ).SerializeToString()

    def _constants(self) -> tuple[bool, int, int, int, int]:
        """Return what seldom changes."""
        registry = self._registry
        versions = registry.adapters.version, registry.wanted.version, registry.encoders.version
        return registry.is_complete, registry.pd_threshold, *versions


def _outline(entry: EngineEntry) -> bytes:
    """Return which engine it is, what it does, and where its KV is, as a part of a serialized ``Snapshot``: when a
    thousand engines join, each of them gets a thousand of these."""
    identity = entry.identity
    shown = EngineEntry(
        identity=EngineIdentity(
            engine_id=identity.engine_id, epoch=identity.epoch, kv_address=identity.kv_address, host=identity.host
        ),
        report=EngineReport(role=entry.report.role, state=entry.report.state),
        number=entry.number,
    )
    return Snapshot(engines=[shown]).SerializeToString()
