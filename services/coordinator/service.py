"""Runs the coordinator as a service."""

import asyncio

from prometheus_client import Counter, Gauge

from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.placement.rules import RULES

from .attentive_clock import AttentiveClock
from .coordinator_servicer import CoordinatorServicer, add_to_server
from .coordinator_settings import CoordinatorSettings
from .engine_placement import Policy
from .engine_registry import Registry


class CoordinatorService:
    """Connects registry and servicer. No tokens pass the coordinator and its state is soft, so nothing is drained."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.servicer: CoordinatorServicer | None = None

    async def start(self, host: Host) -> None:
        clock = AttentiveClock(asyncio.get_running_loop().time)
        registry = Registry(
            host.epoch,
            clock,
            policy=Policy(pd_threshold=self._settings.pd_threshold, rule=RULES[self._settings.placement]),
            settle_seconds=self._settings.settle_seconds,
            prefix_index_bytes=self._settings.prefix_index_mib << 20,
        )
        engines = Gauge("tokenloom_engines", "Engines that are joined.", registry=host.metrics)
        engines.set_function(lambda: len(registry))
        picks = Counter(
            "tokenloom_picks",
            "Picks: WHOLE, PREFILL, DECODE or an error's reason.",
            ("outcome",),
            registry=host.metrics,
        )
        self.servicer = CoordinatorServicer(registry, self._settings.instance_id, host.epoch, picks)
        host.add_servicer(add_to_server, self.servicer)
        host.spawn(clock.run(), name="clock")
        host.spawn(self.servicer.publish(), name="publish")

    async def drain(self) -> None:
        pass

    async def stop(self) -> None:
        if self.servicer is not None:
            self.servicer.close()
