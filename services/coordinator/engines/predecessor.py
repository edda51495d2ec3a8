"""Remembers what the active coordinator shows, for the one that takes its place. No I/O."""

from collections.abc import Collection, Sequence

from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.types_pb2 import Adapter


class Predecessor:
    """Takes the views of the active coordinator.

    Attributes:
        engine_ids: The engines of its last complete view: a new coordinator's view is complete once they are back.
        adapters: The LoRA adapters that all engines should have.
        unloaded: Names of adapters that were unloaded, the latest last.
    """

    def __init__(self) -> None:
        self.engine_ids: Collection[str] = ()
        self.adapters: Sequence[Adapter] = ()
        self.unloaded: Sequence[str] = ()

    def take(self, view: RegistryView) -> None:
        """Take a view after a change. An incomplete one, of a coordinator that is new itself, says less than the one
        before."""
        if view.complete:
            self.engine_ids = [entry.identity.engine_id for entry in view.engines]
            self.adapters, self.unloaded = view.adapters, view.unloaded_adapters
