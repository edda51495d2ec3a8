"""How the KV of a core moves, put together from its configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..config import EngineConfig
from .failpoints import Failpoints
from .kv_connector import KVConnector
from .kv_service import KVService
from .kv_transport import KVTransport
from .multi_connector import MultiConnector
from .offload_connector import OffloadConnector
from .pull_connector import PullConnector


class CoreKV(NamedTuple):
    """The connector of a core, and what belongs to it."""

    connector: KVConnector
    failpoints: Failpoints
    service: KVService | None
    """What the KV thread runs; None: nothing moves between engines."""


def make_core_kv(config: EngineConfig, transports: Sequence[KVTransport]) -> CoreKV | None:
    """None where KV stays where it is. Raises ``ValueError`` naming a setting that does not work."""
    kv = config.kv
    if kv.policy not in ("recompute", "fail"):
        raise ValueError(f"kv.policy is {kv.policy!r}; it must be recompute or fail")
    failpoints = Failpoints(kv.failpoints)
    connectors: list[KVConnector] = []
    service = None
    if transports:
        service = KVService(kv, transports, failpoints)
        connectors.append(PullConnector(service, config.cache.block_size, failpoints))
    if kv.offload_path:
        connectors.append(OffloadConnector(config.cache, Path(kv.offload_path), kv.offload_bytes))
    if not connectors:
        return None
    return CoreKV(connectors[0] if len(connectors) == 1 else MultiConnector(connectors), failpoints, service)
