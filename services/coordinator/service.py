"""Runs the coordinator as a service. Before, it stands by while another coordinator is active: follows it, and waits
for the lease."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Gauge

from tokenloom.process.fall_backs import FallBacks
from tokenloom.process.plugins import load
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.placement.rules import RULES, Rule, plugged_rule
from tokenloom.services.runtime.registry.registry_view import watch_registry
from tokenloom.services.runtime.tasks import first_of
from tokenloom.services.runtime.telemetry.fast_metrics import Counter
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

from .cache_followers import CacheFollowers
from .coordinator_servicer import CoordinatorServicer, add_to_server
from .coordinator_settings import CoordinatorSettings
from .engines.engine_placement import Policy
from .engines.engine_record import StallAwareClock
from .engines.engine_registry import Registry
from .engines.engine_signs import DAMAGED, WRONG
from .engines.rebalancing import Rebalancer
from .engines.wanted_state import Predecessor
from .lease import FileLease, KubernetesLease, LeaderLease, LeaseApi
from .picks.pick_slices import PickMetrics

log = logging.getLogger(__name__)


async def take_over(lease: LeaderLease, channels: Channels, address: str, predecessor: Predecessor) -> None:
    """Return when this process holds the lease. ``predecessor``: takes what the coordinator at ``address`` shows until
    then."""
    log.info("waiting for the lease")
    # Only the holder opens the port, which all share: a caller reaches the active one, and no peer knows that
    # there are several. Another answers 2.0 to 2.7 s after the death of a Lease's holder, 0.25 to 0.45 s after that of
    # a lock's.
    await first_of(lease.acquire(), _follow(predecessor, channels, address))
    log.info("active; %d engines of the former coordinator are known", len(predecessor.engine_ids))


async def _follow(predecessor: Predecessor, channels: Channels, address: str) -> None:
    """Follow whatever coordinator is active, without end."""
    async with channels.open(address, "coordinator") as channel:
        await watch_registry(CoordinatorStub(channel), predecessor.take, without_loads=True)


async def place_natively(registry: Registry, has_many: asyncio.Event, fall_backs: FallBacks) -> None:
    """Let a registry place natively from the moment at which it has many engines."""
    await has_many.wait()
    # Imported here: most coordinators have a few engines.
    from .native_placement import load_library, use_natively

    try:
        library = await asyncio.to_thread(load_library)  # which may compile it, once on a machine
    except Exception as error:  # of whatever kind: Python compares them as well
        log.info("engines are compared in Python", exc_info=True)
        fall_backs.begin("slow_kernels", f"engines are compared in Python: {error}")
    else:
        use_natively(registry, library)


AHEAD_MILLISECONDS = 3_600_000
"""The bound in the file is so far ahead: it is written once in an hour, and not with each number."""


class RisingClock:
    """Returns milliseconds since 1970 that are never below those of the process before, though the wall clock was set
    back meanwhile: a coordinator knows only the numbers of engines that have joined it.

    A file holds a bound of what was returned.
    """

    def __init__(self, read: Callable[[], int], path: Path | None) -> None:
        """``read``: the wall clock. ``path``: of the file; None: nothing is kept."""
        self._read = read
        self._path = path
        self._least = self._bound = 0
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self._least = self._bound = int(path.read_text())

    def __call__(self) -> int:
        now = max(self._read(), self._least)
        if now >= self._bound:
            self._bound = now + AHEAD_MILLISECONDS
            self._keep()
        return now

    def _keep(self) -> None:
        if self._path is None:
            return
        draft = self._path.with_name(f".{self._path.name}.new")
        try:
            draft.write_text(str(self._bound))
            draft.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error.strerror)


class CoordinatorService:
    """Connects registry and servicer. No tokens pass the coordinator and its state is soft, so nothing is drained.

    With a lease, only its holder listens, so that every peer that connects reaches the active coordinator.
    """

    def __init__(self, settings: CoordinatorSettings, lease: LeaderLease | None = None) -> None:
        """``lease``: None for the one that the settings name, if they do."""
        self._settings = settings
        self._lease = lease
        self._predecessor = Predecessor()
        self.servicer: CoordinatorServicer | None = None

    async def stand_by(self, host: Host) -> None:
        """Return when this coordinator is the active one. Until then its health port answers SERVING: it does all that
        a coordinator has to do that stands by."""
        settings = self._settings
        lease = self._lease = self._lease or _lease(settings, host)
        if lease is None:
            return
        if host.health_address:
            host.publish_addresses()
            # SERVING although it does not listen: as NOT_SERVING, a standby would stop every rollout of Kubernetes, and
            # a standby that listened and refused would need addresses of its own at each client.
            await host.health.set_serving(True)
        await take_over(lease, host.channels, settings.coordinator or settings.listen, self._predecessor)
        # Its failure ends the process. A coordinator that may have lost the lease must not answer one more pick.
        host.spawn(lease.keep(), name="lease")

    async def start(self, host: Host) -> None:
        state = self._settings.state_file
        numbers = None if state is None else state.with_suffix(".numbers")
        clock = StallAwareClock(asyncio.get_running_loop().time)
        registry = Registry(
            host.epoch,
            clock,
            policy=Policy(
                pd_threshold=self._settings.pd_threshold,
                rule=_rule(self._settings, host),
                has_sessions=self._settings.sessions,
                mixes_numerics=self._settings.mixed_numerics,
            ),
            settle_seconds=self._settings.settle_seconds,
            predecessor=self._predecessor,
            prefix_index_bytes=self._settings.prefix_index_mib << 20,
            fall_backs=host.fall_backs,
            wall_milliseconds=RisingClock(host.clock.wall_milliseconds, numbers),
        )
        engines = Gauge("tokenloom_engines", "Engines that are joined.", registry=host.metrics)
        engines.set_function(lambda: len(registry))
        encoders = Gauge("tokenloom_encoders", "Encoders that are joined.", registry=host.metrics)
        encoders.set_function(lambda: len(registry.encoders))
        reports = Gauge("tokenloom_reports_read", "Reports of engines since the start.", registry=host.metrics)
        reports.set_function(lambda: registry.num_reports)
        text = "Engines that ended because their weights had changed in memory."
        # Here, because the engine's own metrics end with it.
        Counter(host.metrics, "tokenloom_engine_weights_damaged", text, {}, lambda: registry.num_ended[DAMAGED])
        text = "Engines that ended because their tokens were not those of other engines (--verify)."
        Counter(host.metrics, "tokenloom_engine_quarantined", text, {}, lambda: registry.num_ended[WRONG])
        lines = Gauge("tokenloom_session_lines", "Lines of turns of sessions that are known.", registry=host.metrics)
        lines.set_function(lambda: len(registry.sessions))
        caches = CacheFollowers(registry.prefixes, registry.states, host.channels, host.spawn, host.fall_backs)
        followed = Gauge("tokenloom_followed_caches", "Engines whose KV events are followed.", registry=host.metrics)
        followed.set_function(lambda: caches.num_followed)
        self.servicer = CoordinatorServicer(
            *(registry, self._settings.instance_id, host.epoch, PickMetrics(host.metrics), caches),
            clock=host.clock.seconds,
            rebalancer=Rebalancer(self._settings.rebalance),
        )
        self.servicer.bill = host.bill
        host.add_servicer(add_to_server, self.servicer)
        host.spawn(clock.run(), name="clock")
        host.spawn(place_natively(registry, self.servicer.has_many, host.fall_backs), name="native placement")
        host.spawn(self.servicer.publish(), name="publish")

    async def drain(self) -> None:
        pass

    async def stop(self) -> None:
        if self.servicer is not None:
            # Before the lease is released: engines whose streams end now would otherwise leave the registry, and the
            # last snapshot, by which output processors go on placing, would be empty.
            self.servicer.close()
        if self._lease is not None:
            await self._lease.release()


def _rule(settings: CoordinatorSettings, host: Host) -> Rule:
    """Return the rule that the settings name. Raises ``InvalidArgument`` for a plugin that cannot be loaded."""
    if (rule := RULES.get(settings.placement)) is not None:
        return rule
    try:
        costs = load("placement_rules", settings.placement, settings.plugins)
    except ValueError as error:
        raise InvalidArgument(f"placement: {error}", "placement") from error
    return plugged_rule(costs, lambda reason: host.fall_backs.add("failed_plugin", f"{settings.placement}: {reason}"))


def _lease(settings: CoordinatorSettings, host: Host) -> LeaderLease | None:
    kind, _, name = settings.lease.partition(":")
    if kind == "file":
        return FileLease(Path(name))
    if kind == "kubernetes":
        try:
            # The epoch makes the identity unique: a container that was restarted waits like any other.
            return KubernetesLease(LeaseApi(), name, f"{settings.instance_id}_{host.epoch:016x}")
        except OSError as error:
            raise InvalidArgument(f"lease: the pod has no service account: {error}", "lease") from None
    return None
