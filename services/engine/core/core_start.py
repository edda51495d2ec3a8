"""Starts an engine core and the link to it."""

import functools
import logging

from tokenloom.engine_core.client.async_core_client import AsyncCoreClient, AsyncMPClient
from tokenloom.engine_core.data.errors import EngineConfigError, EngineStartError
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
