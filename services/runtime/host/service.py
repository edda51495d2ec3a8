"""One lifecycle for all services: bind, start, serve, drain, stop.

A process answers health checks (NOT_SERVING) and knows its address before its service starts, is SERVING only when the
service is ready, is NOT_SERVING while it drains, and dies at the second signal.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

import uvloop

from tokenloom.request.errors import InvalidArgument, NotFound, TokenloomError

from ..telemetry import logs
from .host import Host
from .service_settings import ServiceSettings
from .tasks import first_of

log = logging.getLogger(__name__)

_Settings = TypeVar("_Settings", bound=ServiceSettings)

USAGE_ERROR = 2
"""Exit status for settings or a model that another start would refuse again, as of a flag that does not exist."""

_STOP_GRACE = 0.25
"""Seconds left for calls after the drain: what is open then are the streams of peers, which never end by themselves."""


class Service(Protocol):
    """What each service implements; made from its settings."""

    async def start(self, host: Host) -> object:
        """Connects, loads, adds servicers to the host; returns when ready to serve."""

    async def drain(self) -> None:
        """Takes no new work and returns when the live work is done; cancelled when the drain timeout passes."""

    async def stop(self) -> None:
        """Releases everything. Idempotent; also called when ``start`` failed half-way."""


@contextlib.asynccontextmanager
async def running(service: Service, settings: ServiceSettings) -> AsyncIterator[Host]:
    """The whole lifecycle in this event loop. The body runs while the service is SERVING; leaving it drains and stops.

    A failure that nobody awaited (``host.failure.take()``) is raised at the end.
    """
    async with _lifecycle(service, settings) as host:
        yield host
    host.failure.raise_unseen()


@contextlib.asynccontextmanager
async def _lifecycle(service: Service, settings: ServiceSettings) -> AsyncIterator[Host]:
    host = Host(settings)
    try:
        await host.open()
        await first_of(service.start(host), host.failure.wait())
        host.failure.raise_unseen()
        await host.ready()
        yield host
        await _drain(service, host)
    finally:
        await host.health.set_serving(False)
        try:
            await service.stop()
        finally:
            await host.close(_STOP_GRACE)


async def _drain(service: Service, host: Host) -> None:
    """Ends early when the service fails: what the live work needs is gone."""
    await host.health.set_serving(False)
    if host.failure.happened:
        return
    try:
        async with asyncio.timeout(host.settings.drain_timeout):
            await first_of(service.drain(), host.failure.wait())
    except TimeoutError:
        log.warning("work was still live after %g s of draining; it is dropped", host.settings.drain_timeout)


def main(service_class: Callable[[_Settings], Service], settings_class: type[_Settings], name: str) -> int:
    """A whole process: reads settings, serves until a signal, returns the exit status."""
    settings = settings_class.load()
    logs.setup(name, settings.instance_id, level=settings.log_level, style=settings.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service_class(settings), settings))


async def _serve(service: Service, settings: ServiceSettings) -> int:
    stopping = asyncio.Event()
    starting = _cancel_on(stopping)
    _first_signal_stops(stopping)
    try:
        async with _lifecycle(service, settings) as host:
            starting.cancel()
            _freeze_heap()
            log.info("serving on %s", host.address)
            await first_of(stopping.wait(), host.failure.wait())
        return 1 if host.failure.happened else 0
    except asyncio.CancelledError:
        if not stopping.is_set():
            raise
        return 0
    except (InvalidArgument, NotFound) as error:
        log.error("%s", error.message)
        return USAGE_ERROR
    except TokenloomError as error:
        log.error("%s", error.message)
    except Exception:
        log.exception("stopped by a bug")
    finally:
        starting.cancel()
    return 1


def _freeze_heap() -> None:
    """What is there once a service is ready mostly stays: the collector need not walk it in the middle of a step."""
    gc.collect()
    gc.freeze()


def _cancel_on(stopping: asyncio.Event) -> "asyncio.Task[None]":
    """Until cancelled itself, turns a stop signal into cancelling the current task: there is nothing to drain yet."""
    current = asyncio.current_task()
    assert current is not None

    async def wait() -> None:
        await stopping.wait()
        current.cancel()

    return asyncio.create_task(wait())


def _first_signal_stops(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # the second one kills, even when the event loop hangs
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
