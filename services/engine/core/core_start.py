"""Starts an engine core and the link to it, and kills a core that hangs, so that its requests continue on other engines
and the engine is started anew."""

import asyncio
import contextlib
import functools
import logging
from pathlib import Path
from typing import Protocol

from tokenloom.engine_core.client.async_core_client import AsyncCoreClient, AsyncMPClient
from tokenloom.engine_core.control.step_watchdog import Pulse
from tokenloom.engine_core.data.errors import EngineConfigError, EngineStartError
from tokenloom.process.process_guard import is_stopped
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.process_metrics import cpu_seconds_of, show_token_cost

from ..records.engine_metrics import EngineMetrics, LoraMetrics
from ..records.engine_settings import EngineSettings
from ..records.kv_event_feed import KVEventFeed
from ..records.load import LoadTracker
from .core_link import CoreLink
from .row_loads import RowLoads, RowMetrics
from .workers import CORE_COMMAND

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
LEAST_SHARE = 0.2
"""Share of a look that counts however long the core waited for a processor: a loop without end is found on a busy
machine too."""
STOPPED_SECONDS = 2.5
"""How long the core's process may be stopped (SIGSTOP), as for the parts of the mesh."""


def process_client(settings: EngineSettings, checkpoint: str) -> AsyncMPClient:
    """Return the client of a core in a process of its own, for the checkpoint directory ``checkpoint``."""
    flags = ("--instance-id", settings.instance_id, "--log-level", settings.log_level)
    return AsyncMPClient(
        settings.engine_config(checkpoint), [*CORE_COMMAND, *flags, "--log-format", settings.log_format]
    )


async def start_core(
    settings: EngineSettings, client: AsyncCoreClient, load: LoadTracker, host: Host, name: str
) -> CoreLink:
    """Start the core that ``client`` stands for. ``name`` is the model's name in metrics.

    Raises ``InvalidArgument`` for a wrong configuration or checkpoint, ``FailedPrecondition`` for another failure.
    """
    if isinstance(client, AsyncMPClient):
        process_metrics.observe_process(host.metrics, "tokenloom_engine_core", lambda: client.pid)
        host.billed_apart = lambda: client.pid
    measures_logits = settings.engine.worker.logits_metrics_interval > 0
    speculative = settings.engine.speculative
    metrics = EngineMetrics(host.metrics, name, settings.instance_id, logits=measures_logits, speculative=speculative)
    try:
        ready = await client.start()
    except EngineConfigError as error:
        raise InvalidArgument(str(error)) from None
    except EngineStartError as error:
        raise FailedPrecondition(str(error)) from None
    if ready.num_state_slots:
        log.info("%d slots for the states of layers", ready.num_state_slots)
    log.info("%d KV blocks, context of %d tokens; warm-up: %s", ready.num_kv_blocks, ready.max_model_len, ready.warm_up)
    for kind, detail in ready.fall_backs:
        host.fall_backs.begin(kind, detail)
    _show_token_costs(host, metrics, client)
    if (lora := settings.engine.lora).enable:
        LoraMetrics(host.metrics, metrics.labels, lora.max_loras, lambda: load.loras)
    # With layers of different windows one block of tokens takes a block of each group; the mesh counts blocks of
    # tokens.
    load.started(ready.num_kv_blocks // ready.num_kv_groups)
    load.set_loras(ready.loras)
    metrics.observe_ready(ready, enable_prefix_caching=settings.engine.cache.enable_prefix_caching)
    metrics.kv.start_transports(name for name in settings.kv_transports if name != "auto")
    kv_events = KVEventFeed(host.epoch) if settings.engine.cache.kv_events else None
    core = CoreLink(
        client,
        ready,
        load,
        metrics,
        kv_events=kv_events,
        logs_events=settings.engine.scheduler.log_events,
        tracer=host.tracer,
        clock=host.clock.seconds,
    )
    core.bill = host.bill
    if host.bill is not None:
        host.bills.show("engine_core", lambda: core.core_cpu_ns)
    if ready.media is not None:
        row_metrics = RowMetrics(host.metrics, metrics.labels, lambda: metrics.stats)
        core.rows = RowLoads(core, host.channels, ready.hidden_size, row_metrics)
    return core


def _show_token_costs(host: Host, metrics: EngineMetrics, client: AsyncCoreClient) -> None:
    """Show the CPU time per token of the front, and of the core if it has a process of its own."""

    def num_tokens() -> int:
        return metrics.generation_tokens.value

    show_token_cost(host.metrics, num_tokens)
    if isinstance(client, AsyncMPClient):
        core = functools.partial(cpu_seconds_of, client.pid)
        show_token_cost(host.metrics, num_tokens, prefix="tokenloom_engine_core", cpu_seconds=core)


class WatchedCore(Protocol):
    """Describes a core in a process of its own (:class:`AsyncMPClient`)."""

    @property
    def pid(self) -> int | None:
        """The id of the process."""

    def pulse(self) -> Pulse | None:
        """Return whether the core's steps end in time; None if that is not known."""

    def kill(self, reason: str) -> None:
        """Kill the core and fail what waits for it."""


class CoreWatchdog:
    """Looks at a core at intervals. It counts looks instead of time, so that a pause of this process counts as one
    look, however long it lasts. Time for which the core's threads wait for a processor does not count: on a machine
    that others use too, a step may take many times as long as alone."""

    def __init__(self, core: WatchedCore) -> None:
        self._core = core
        self._beat = -1
        self._stuck_looks = 0.0
        self._waited_seconds: float | None = None  # of all threads, at the look before; None: the step has just begun
        self._stopped_looks = 0

    async def run(self) -> None:
        """Look until the core hangs, and kill it then."""
        while not (reason := self.look()):  # noqa: ASYNC110 - the core cannot set an event when it hangs
            await asyncio.sleep(TICK_SECONDS)
        log.error("%s; it is killed", reason)
        self._core.kill(reason)

    def look(self) -> str:
        """Return what is wrong with the core; empty: nothing. To be called every :data:`TICK_SECONDS`."""
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self._core.pid) else 0
        if self._stopped_looks * TICK_SECONDS > STOPPED_SECONDS:
            return "the engine core's process is stopped"
        pulse = self._core.pulse()
        if pulse is None or not pulse.limit or pulse.beat != self._beat:
            self._beat = -1 if pulse is None else pulse.beat
            self._stuck_looks, self._waited_seconds = 0.0, None
            return ""
        # On a busy machine a loop without end is found after up to five times the limit. Threads that only sleep wait
        # for no processor, so that they are found as on an idle one.
        self._stuck_looks += self._share_that_counts()
        if self._stuck_looks * TICK_SECONDS > pulse.limit:
            return f"a step of the engine core takes longer than {pulse.limit:.1f} s"
        return ""

    def _share_that_counts(self) -> float:
        """Return for which share of the time since the look before the core could have computed."""
        before, self._waited_seconds = self._waited_seconds, waited_seconds(self._core.pid)
        if before is None:
            return 1.0
        # Beside two busy loops a step of the demo model took over 3 s, and a healthy core was killed: its time in the
        # run queue (schedstat) is no sign of a hang.
        return max(LEAST_SHARE, min(1.0, 1.0 - (self._waited_seconds - before) / TICK_SECONDS))


def waited_seconds(pid: int | None) -> float:
    """Return for how long the threads of a process have waited for a processor, together; 0 if that is not known."""
    nanoseconds = 0
    for statistics in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
            nanoseconds += int(statistics.read_text().split()[1])
    return nanoseconds / 1e9
