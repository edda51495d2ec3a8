"""Keeps which LoRA adapters all engines should have, and what to ask of engines that differ. No I/O."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from tokenloom.request.errors import InvalidArgument, ModelNotFound, ResourceExhausted, TokenloomError, Unavailable
from tokenloom.v1.coordinator_pb2 import AdapterChanges
from tokenloom.v1.types_pb2 import Adapter

from .engine_record import EngineRecord

MAX_ADAPTERS = 1024
"""Limits the adapters, so that a snapshot stays far below the message limit."""
MAX_UNLOADED = 1024
"""Names remembered of adapters that were unloaded: an engine that was away meanwhile unloads them when it returns."""
LOAD_SECONDS = 5.0
"""How long an engine may take to load an adapter for a request before another engine is asked."""


class WantedAdapters:
    """Keeps the adapters by name.

    A new coordinator takes those of joining engines, because they agree unless an operator is changing them. Later, the
    operator's last word on a name counts: an engine that joins is asked to load and unload what differs.

    Attributes:
        to_load: The engines that should load an adapter for a request, with what each should do; the caller takes them.
        changed: Names of adapters that all joined engines have to be compared with; the caller empties it.
        version: Grows when the adapters may have changed.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, Adapter] = {}
        self._digests: dict[bytes, Adapter] = {}
        self._unloaded: OrderedDict[str, None] = OrderedDict()
        self._asked_at: dict[bytes, float] = {}  # of digests in _digests
        self.to_load: list[tuple[str, AdapterChanges]] = []
        self.changed: dict[str, None] = {}
        self.version = 0

    def __iter__(self) -> Iterator[Adapter]:
        """Yield the adapters in the order of their names."""
        return iter([self._wanted[name] for name in sorted(self._wanted)])

    @property
    def unloaded(self) -> Collection[str]:
        """Names of adapters that were unloaded, the latest last."""
        return self._unloaded.keys()

    def set(self, adapter: Adapter, *, unloaded: bool) -> None:
        """Record what an operator did on all engines. Raises ``InvalidArgument`` and ``ResourceExhausted``."""
        if not adapter.name or not (adapter.digest or unloaded):
            raise InvalidArgument("adapter.name or adapter.digest is empty", "adapter")
        self._note(adapter.name)
        if unloaded:
            self._wanted.pop(adapter.name, None)
            # Removed first, so that the name moves to the end of the order: the oldest ones are forgotten.
            self._unloaded.pop(adapter.name, None)
            self._unloaded[adapter.name] = None
            while len(self._unloaded) > MAX_UNLOADED:
                self._unloaded.popitem(last=False)
        elif len(self._wanted) >= MAX_ADAPTERS and adapter.name not in self._wanted:
            raise ResourceExhausted(f"{MAX_ADAPTERS} adapters are loaded; unload one first.")
        else:
            self._wanted[adapter.name] = adapter
            self._unloaded.pop(adapter.name, None)
        self._index()

    def inherit(self, adapters: Iterable[Adapter], unloaded: Iterable[str]) -> None:
        """Take over what a former coordinator kept: its adapters, and the names of those that were unloaded."""
        self._wanted = {adapter.name: adapter for adapter in adapters}
        self._unloaded = OrderedDict.fromkeys(unloaded)
        self._index()

    def join(self, record: EngineRecord) -> AdapterChanges | None:
        """Take the adapters of an engine that joins, unless the names are known; return what it should change."""
        before = len(self._wanted)
        for adapter in record.report.adapters:
            if adapter.name not in self._unloaded and len(self._wanted) < MAX_ADAPTERS:
                if adapter.name not in self._wanted:
                    self._note(adapter.name)
                self._wanted.setdefault(adapter.name, adapter)
        if len(self._wanted) != before:
            self._index()
        return self.lacking(record)

    def lacking(self, record: EngineRecord, names: Collection[str] | None = None) -> AdapterChanges | None:
        """Return what an engine should change, by its last report; None: nothing. ``names``: of these alone."""
        has = {adapter.name: adapter for adapter in record.report.adapters if names is None or adapter.name in names}
        unload = [name for name, each in has.items() if self._digest(name) != each.digest]
        among = self._wanted if names is None else [name for name in self._wanted if name in names]
        load = [self._wanted[name] for name in among if name in unload or name not in has]
        if not record.can_load_adapters or not (unload or load):
            return None
        return AdapterChanges(load=load, unload=unload)

    def request(self, pool: Sequence[EngineRecord], digest: bytes, now: float) -> TokenloomError:
        """Ask the engine with the least load among those that can load an adapter to load it, because none has it.

        Returns the error of the pick: ``Unavailable``, because a later pick finds the adapter there, or
        ``ModelNotFound`` if no engine should have it.
        """
        if (adapter := self._digests.get(digest)) is None:
            return ModelNotFound("The LoRA adapter of this request was unloaded or replaced.", field="model")
        able = [record for record in pool if record.can_load_adapters]
        if able and now >= self._asked_at.get(digest, now):
            self._asked_at[digest] = now + LOAD_SECONDS
            # One engine is asked and not all: adapters that only a few requests use would push others out of every
            # engine's slots.
            best = min(able, key=lambda record: record.score)
            self.to_load.append((best.identity.engine_id, AdapterChanges(load=[adapter])))
        return Unavailable(f"No engine has the LoRA adapter {adapter.name!r} now; retry.")

    def _note(self, name: str) -> None:
        self.changed[name] = None
        if len(self.changed) > MAX_ADAPTERS + MAX_UNLOADED:  # an engine that does not read its commands delays them
            del self.changed[next(iter(self.changed))]

    def _digest(self, name: str) -> bytes:
        return self._wanted[name].digest if name in self._wanted else b""

    def _index(self) -> None:
        self.version += 1
        self._digests = {adapter.digest: adapter for adapter in self._wanted.values()}
        self._asked_at = {digest: at for digest, at in self._asked_at.items() if digest in self._digests}
