"""Keeps a whole view of the coordinator's registry from the changes that it streams, and follows them."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import grpc.aio

from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    EngineEntry,
    EngineIdentity,
    EngineLoads,
    PlacementRule,
    Snapshot,
    WatchRequest,
)
from tokenloom.v1.types_pb2 import Adapter

from .engine_loads import fit_together, set_loads

log = logging.getLogger(__name__)

REWATCH_SECONDS = 0.2

_MAX_PENDING = 32
"""Messages whose loads wait at most until the owner of the view asks for them."""
_MAX_PREFIXES = 1 << 14
"""Beginnings of prompts that are kept: twice as many as a coordinator remembers."""


class RegistryView:
    """Shows what one ``Watch`` has streamed so far.

    Loads are kept as they arrive until they are asked for: an output processor follows a thousand
    engines, and looks at them only while the coordinator is away.

    Attributes:
        coordinator_epoch: Incarnation of the coordinator.
        revision: Of the last message; 0: none has arrived.
        complete: False while a new coordinator waits for engines to join again.
        pd_threshold: Uncached prompt tokens below which an engine does the whole request.
        mixes_numerics: Whether requests go on between engines of ours and servers of others.
        placement: The rule by which the coordinator compares engines.
        adapters: The LoRA adapters that all engines should have, by name.
        unloaded_adapters: Names of adapters that were unloaded, the latest last.
        desired: What operators want of the engines.
        encoders: The encoders, with the loads of the time when one joined, left or changed its state.
        version: Grows when anything but loads changes.
    """

    def __init__(self) -> None:
        self.coordinator_epoch = 0
        self.revision = 0
        self.complete = False
        self.pd_threshold = 0
        self.mixes_numerics = False
        self.placement = PlacementRule.PLACEMENT_RULE_UNSPECIFIED
        self.adapters: Sequence[Adapter] = ()
        self.unloaded_adapters: Sequence[str] = ()
        self.desired = DesiredState()
        self.encoders: Sequence[EngineEntry] = ()
        self.version = 0
        self._entries: dict[str, EngineEntry] = {}
        self._names: dict[int, str] = {}
        # Loads that were not applied yet: of each number the newest message that has it, and the row.
        self._pending: dict[int, tuple[EngineLoads, int]] = {}
        self._num_pending = 0  # messages
        self._engines: Sequence[EngineEntry] | None = None
        self._prefixes: dict[int, tuple[int, int]] = {}  # the latest last

    @property
    def engines(self) -> Sequence[EngineEntry]:
        """All engines. :meth:`update_loads` changes these entries in place; a new :attr:`version` has other entries."""
        self.update_loads()
        if self._engines is None:
            self._engines = list(self._entries.values())
        return self._engines

    def identity(self, name: str) -> EngineIdentity | None:
        """Return what is known of an engine; None if it is not shown."""
        entry = self._entries.get(name)
        return None if entry is None else entry.identity

    @property
    def identities(self) -> Iterator[EngineIdentity]:
        """Those of all engines."""
        return (entry.identity for entry in self._entries.values())

    def engines_of(self, block_hash: int) -> Sequence[int]:
        """Return the numbers of engines that were given a prompt with this beginning; empty: it is not known."""
        return self._prefixes.get(block_hash, ())

    def update_loads(self) -> None:
        """Give the entries of :attr:`engines` the loads that have arrived since they were read last."""
        rows: dict[int, tuple[EngineLoads, list[EngineEntry], list[int]]] = {}  # by message
        for number, (loads, row) in self._pending.items():
            _, entries, numbers = rows.setdefault(id(loads), (loads, [], []))
            entries.append(self._entries[self._names[number]])
            numbers.append(row)
        for loads, entries, numbers in rows.values():
            set_loads(entries, loads, numbers)
        self._pending.clear()
        self._num_pending = 0

    def take(self, message: Snapshot) -> bool:
        """Apply the next message; the view keeps it, so the caller must not change it. Returns False for a change to
        another revision than this view has: the watcher missed a message and has to watch again. Raises ``ValueError``
        for columns that do not fit together, and for engines without a name."""
        # Before anything is changed. Taken for one more engine, an entry without a name would also be one without a
        # context, and the limits of a mesh are the smallest of its engines'.
        if not all(map(_is_named, message.engines)):
            raise ValueError("an engine has no name")
        if not message.base_revision:
            self._replace(message)
            return True
        if (message.coordinator_epoch, message.base_revision) != (self.coordinator_epoch, self.revision):
            return False
        return self._change(message)

    def _replace(self, message: Snapshot) -> None:
        self._entries.clear()
        self._names.clear()
        self._pending.clear()
        self._num_pending = 0
        self._prefixes.clear()
        self._take_prefixes(message)
        self._take_adapters(message)
        self.encoders = list(message.encoders)
        for entry in message.engines:
            self._put(entry)
        self._engines = None
        self.version += 1
        self._take_header(message)

    def _change(self, message: Snapshot) -> bool:
        # Here and not where the loads are read: that is in the middle of a request, which would fail, and so would the
        # next one.
        if not fit_together(message.loads):
            raise ValueError("the loads of the engines differ in number")
        header = self.complete, self.pd_threshold
        for name in message.left:
            self._remove(name)
        has_loads = message.HasField("loads")
        for entry in message.engines:
            if not self._put(_copy(entry) if has_loads else entry):
                return False
        numbers = message.loads.number
        if not all(map(self._names.__contains__, numbers)):
            return False
        self._keep_loads(message.loads)
        self._take_prefixes(message)
        if message.new_adapters:
            self._take_adapters(message)
        if message.new_encoders:
            self.encoders = list(map(_copy, message.encoders))
        self._take_header(message)
        is_other = message.new_adapters or message.new_encoders
        if message.left or message.engines or is_other or header != (self.complete, self.pd_threshold):
            self._engines = None
            self.version += 1
        return True

    def _take_adapters(self, message: Snapshot) -> None:
        self.adapters = list(message.adapters)
        self.unloaded_adapters = list(message.unloaded_adapters)

    def _take_prefixes(self, message: Snapshot) -> None:
        columns = message.prefixes
        for block_hash, *numbers in zip(columns.block_hash, columns.engine, columns.other_engine, strict=True):
            self._prefixes.pop(block_hash, None)
            self._prefixes[block_hash] = numbers[0], numbers[1]
        while len(self._prefixes) > _MAX_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]

    def _take_header(self, message: Snapshot) -> None:
        self.coordinator_epoch = message.coordinator_epoch
        self.revision = message.revision
        self.complete = message.complete
        self.pd_threshold = message.pd_threshold
        self.mixes_numerics = message.mixes_numerics
        self.placement = message.placement
        if message.HasField("desired"):
            self.desired = message.desired

    def _put(self, entry: EngineEntry) -> bool:
        """Add or replace an engine. Returns False if its identity is not known."""
        if not entry.HasField("identity"):
            if (name := self._names.get(entry.number)) is None:
                return False
            entry.identity.CopyFrom(self._entries[name].identity)
        name = entry.identity.engine_id
        # A number stands for one stay of an engine. Loads under the old number must not reach the engine that came
        # back.
        if (before := self._entries.get(name)) is not None and before.number != entry.number:
            self._remove(name)
        self._entries[name] = entry
        self._names[entry.number] = name
        self._pending.pop(entry.number, None)
        return True

    def _remove(self, name: str) -> None:
        if (entry := self._entries.pop(name, None)) is not None:
            self._names.pop(entry.number, None)
            self._pending.pop(entry.number, None)

    def _keep_loads(self, loads: EngineLoads) -> None:
        if not loads.number:
            return
        # Up to 1,750 rows a second arrive, and an output processor reads them only while the coordinator is away. So
        # they are kept in the columns in which they came, and are not written into entries yet.
        self._pending.update((number, (loads, row)) for row, number in enumerate(loads.number))
        self._num_pending += 1
        # An engine that reports seldom keeps an old message, with the columns of a thousand others, alive.
        if self._num_pending >= _MAX_PENDING:
            self.update_loads()


def _is_named(entry: EngineEntry) -> bool:
    """Return whether an entry names its engine, unless it stands for one that is known by its number."""
    return not entry.HasField("identity") or bool(entry.identity.engine_id)


def _copy(shown: EngineEntry) -> EngineEntry:
    """Return an entry that does not keep the message, with the loads of all other engines, in memory."""
    entry = EngineEntry()
    entry.CopyFrom(shown)
    return entry


async def watch_registry(
    stub: "coordinator_pb2_grpc.CoordinatorAsyncStub",
    taken: Callable[[RegistryView], None],
    lost: Callable[[str], None] | None = None,
    *,
    without_loads: bool = False,
) -> NoReturn:
    """Watch, and watch again whenever the stream ends, until cancelled.

    Args:
        taken: Called after each message with the view; every stream begins a new one.
        lost: Called when a stream has ended, with the reason, for a log.
        without_loads: Whether only engines, their states and roles matter.
    """
    request = WatchRequest(changes=True, without_loads=without_loads)
    while True:
        # A new view for each stream: the first message of a stream is whole, and a change of the old stream must not be
        # applied to it. The old view stays in use until that message has come.
        call, view, reason = stub.Watch(request), RegistryView(), "the stream ended"
        try:
            while isinstance(message := await call.read(), Snapshot):
                if not view.take(message):
                    reason = f"a change is missing after revision {view.revision}"
                    break
                taken(view)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name} {error.details()}"
        except Exception:  # of a message that cannot be: the next stream begins with a whole one
            log.exception("a message of the coordinator cannot be taken")
            reason = "a message could not be taken"
        finally:
            call.cancel()
        log.debug("coordinator: %s", reason)
        if lost is not None:
            lost(reason)
        await asyncio.sleep(REWATCH_SECONDS)
