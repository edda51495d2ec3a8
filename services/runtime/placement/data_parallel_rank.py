"""Finds the engine that has a number in its data-parallel group."""

from tokenloom.v1.coordinator_pb2 import EngineIdentity


def has_rank(identity: EngineIdentity, rank: int) -> bool:
    """Return whether an engine has this number. Engines outside of groups have none."""
    return bool(identity.data_parallel_group) and identity.data_parallel_rank == rank
