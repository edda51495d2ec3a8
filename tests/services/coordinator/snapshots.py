"""The whole of a registry at one moment, as one message, made from its records instead of its feed."""

from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.v1.coordinator_pb2 import Snapshot


def snapshot_of(registry: Registry) -> Snapshot:
    entries = map(registry.entry, registry._records)
    return Snapshot(
        coordinator_epoch=registry.epoch,
        revision=registry.revision,
        complete=registry.is_complete,
        engines=[entry for entry in entries if entry is not None],
        pd_threshold=registry.pd_threshold,
        placement=registry.placement,
        adapters=registry.adapters,
    )
