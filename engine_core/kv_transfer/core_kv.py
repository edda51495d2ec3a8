"""Builds the KV connector of a core from its configuration."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..data.config import EngineConfig, KVConfig
from .failpoints import Failpoints
from .kv_connector import KVConnector
from .kv_service import KVService
from .kv_transport import KVTransport
from .multi_connector import MultiConnector
from .offload_connector import OffloadConnector
from .pull_connector import PullConnector


class CoreKV(NamedTuple):
    """Holds the connector of a core and its parts."""

    connector: KVConnector
    failpoints: Failpoints
    service: KVService | None
    """The service that the KV thread runs; None if no KV moves between engines."""


def make_core_kv(
    config: EngineConfig,
    transports: Sequence[KVTransport],
    make_service: Callable[[KVConfig, Sequence[KVTransport], Failpoints], KVService] = KVService,
) -> CoreKV | None:
    """Return the KV parts of a core; None if its KV never moves. Raises ``ValueError`` for a wrong setting.

    ``make_service``: makes the service that moves KV between engines.
    """
    kv = config.kv
    if kv.policy not in ("recompute", "fail"):
        raise ValueError(f"kv.policy is {kv.policy!r}; it must be recompute or fail")
    failpoints = Failpoints(kv.failpoints)
    connectors: list[KVConnector] = []
    service = None
    if transports:
        service = make_service(kv, transports, failpoints)
        connectors.append(PullConnector(service, config.cache.block_size, failpoints))
    # After the pull: a file answers for prompts in general, while a lease was taken for this very request.
    if kv.offload_path:
        connectors.append(OffloadConnector(config.cache, Path(kv.offload_path), kv.offload_bytes))
    if not connectors:
        return None
    return CoreKV(connectors[0] if len(connectors) == 1 else MultiConnector(connectors), failpoints, service)
