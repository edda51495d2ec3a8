"""Remembers what the active coordinator shows, for the one that takes its place. No I/O."""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.types_pb2 import Adapter

from .wanted_adapters import MAX_UNLOADED


class Predecessor:
    """Takes the views of the active coordinator.

    Attributes:
        engine_ids: The engines of its last complete view: a new coordinator's view is complete once they are back.
        adapters: The LoRA adapters that all engines should have.
    """

    def __init__(self) -> None:
        self.engine_ids: Collection[str] = ()
        self.adapters: Sequence[Adapter] = ()
        self._unloaded: OrderedDict[str, None] = OrderedDict()

    @property
    def unloaded(self) -> Sequence[str]:
        """Names of adapters that were unloaded meanwhile, the latest last."""
        return list(self._unloaded)

    def take(self, view: RegistryView) -> None:
        """Take a view after a change. An incomplete one, of a coordinator that is new itself, says less than the one
        before."""
        if not view.complete:
            return
        self.engine_ids = [entry.identity.engine_id for entry in view.engines]
        names = {adapter.name for adapter in view.adapters}
        for adapter in self.adapters:
            if adapter.name not in names:
                self._unloaded[adapter.name] = None
        for name in names & self._unloaded.keys():
            del self._unloaded[name]
        for name in list(islice(self._unloaded, max(len(self._unloaded) - MAX_UNLOADED, 0))):
            del self._unloaded[name]
        self.adapters = list(view.adapters)
