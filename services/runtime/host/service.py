"""The lifecycle of every service: bind, start, serve, drain, stop.

A process answers health checks with NOT_SERVING before its service starts, with SERVING once the service is ready, with
NOT_SERVING while it drains, and dies at the second signal. :class:`Heap` decides when the garbage collector walks its
objects: a full pass stops the event loop, and every stream, for as long as the live requests are many.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeVar, runtime_checkable

import uvloop

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.process.memory import forget_start
from tokenloom.request.errors import InvalidArgument, NotFound, TokenloomError

from ..tasks import first_of
from ..telemetry import logs
from ..telemetry.process_metrics import LoopTurns
from . import limits
from .host import Host
from .host_dependencies import HostDependencies
from .service_settings import ServiceSettings

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

log = logging.getLogger(__name__)

_Settings = TypeVar("_Settings", bound=ServiceSettings)

USAGE_ERROR = 2
"""Exit status for settings or a model that another start would refuse again, such as an unknown flag."""

_SWITCH_SECONDS = 0.001
"""After so long a thread that computes lets the event loop go on, which waits for the interpreter's lock after each of
its system calls. With Python's 5 ms its turns are 5.2 ms late in the median beside one such thread, now 1.2."""

_SETTLE_SECONDS = 0.25
"""Between settlements of the bill, which also come with the ends of requests and with scrapes."""

_STOP_GRACE = 0.25
"""Seconds left for calls after the drain: those still open are the streams of peers, which never end by themselves."""


class Service(Protocol):
    """What each service implements; its constructor takes its settings."""

    async def start(self, host: Host) -> object:
        """Connect, load, and add servicers to the host; return when ready to serve."""

    async def drain(self) -> None:
        """Accept no new work and return when the live work is done; cancelled when the drain timeout passes."""

    async def stop(self) -> None:
        """Release everything. Idempotent; also called when ``start`` failed half-way."""


@runtime_checkable
class StandsBy(Protocol):
    """What a service implements too that may have to wait for another process of its kind to end."""

    async def stand_by(self, host: Host) -> None:
        """Return when this process should listen and start."""


@contextlib.asynccontextmanager
async def running(
    service: Service, settings: ServiceSettings, surroundings: HostDependencies | None = None
) -> AsyncIterator[Host]:
    """Run a service in this event loop. The body runs while the service is SERVING; leaving it drains and stops.

    ``surroundings``: as for :class:`Host`. At the end, raises the failure of the service, unless
    ``host.failure.take()`` returned it.
    """
    async with _lifecycle(service, Host(settings, surroundings), asyncio.Event()) as host:
        yield host
    host.failure.raise_unseen()


class _StoppedEarly(Exception):
    """A signal came before the service was ready."""


@contextlib.asynccontextmanager
async def _lifecycle(service: Service, host: Host, stopping: asyncio.Event) -> AsyncIterator[Host]:
    try:
        await first_of(_start(service, host), host.failure.wait(), stopping.wait())
        host.failure.raise_unseen()
        if stopping.is_set():
            raise _StoppedEarly  # there is nothing to drain
        await host.ready()
        yield host
        await _drain(service, host)
    finally:
        await host.health.set_serving(False)
        host.begin_stop()
        try:
            await service.stop()
        finally:
            await host.close(_STOP_GRACE)


async def _start(service: Service, host: Host) -> None:
    await host.prepare()
    if isinstance(service, StandsBy):
        await service.stand_by(host)
    await host.listen()
    await service.start(host)


async def _drain(service: Service, host: Host) -> None:
    """Wait for the live work, unless the service fails: what the work needs is gone then."""
    await host.health.set_serving(False)
    if host.failure.happened:
        return
    try:
        async with asyncio.timeout(host.settings.drain_timeout):
            await first_of(service.drain(), host.failure.wait())
    except TimeoutError:
        log.warning("dropped the work still live after %g s of draining", host.settings.drain_timeout)


def main(service_class: Callable[[_Settings], Service], settings_class: type[_Settings], name: str) -> int:
    """Run a process: read settings, serve until a signal, and return the exit status."""
    settings = settings_class.load()
    return run(lambda: service_class(settings), settings, name, settings_class.exposed())


def run(make: Callable[[], Service], settings: ServiceSettings, name: str = "", warnings: Sequence[str] = ()) -> int:
    """Serve until a signal, and return the exit status. ``make``: makes the service, once this process is prepared.
    ``warnings``: to be logged first."""
    logs.setup(name or settings.service, settings.instance_id, level=settings.log_level, style=settings.log_format)
    for warning in warnings:
        log.warning("%s", warning)
    try:
        limits.check_limit(limits.raise_limit())
    except TokenloomError as error:
        log.error("%s", error.message)
        return USAGE_ERROR
    forget_start()  # what imports needed; later it would stop an event loop that serves
    sys.setswitchinterval(_SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(make(), settings))


async def _serve(service: Service, settings: ServiceSettings) -> int:
    stopping = asyncio.Event()
    _set_at_first_signal(stopping)
    starting = _new_threads()
    try:
        async with _lifecycle(service, Host(settings), stopping) as host:
            OF_PROCESS.on_change = host.publish_fall_backs
            _new_threads()  # those of the start would wait for ever: few services need any while they serve
            starting.shutdown(wait=False)
            heap = Heap()
            heap.freeze()
            host.spawn(heap.run(), name="heap")
            host.spawn(host.channels.keepalive.run(), name="patience with peers")
            if settings.measure_turns:
                host.spawn(LoopTurns(host.metrics).run(), name="turns of the event loop")
            if host.bill is not None:
                host.spawn(_settle(host.bill), name="bill")
            log.info("serving on %s", host.address)
            await first_of(stopping.wait(), host.failure.wait())
        return 1 if host.failure.happened else 0
    except _StoppedEarly:
        return 0
    except (InvalidArgument, NotFound) as error:
        log.error("%s", error.message)
        return USAGE_ERROR
    except TokenloomError as error:
        log.error("%s", error.message)
    except Exception:
        log.exception("stopped by a bug")
    finally:
        OF_PROCESS.on_change = None
    return 1


async def _settle(bill: "CpuBill") -> NoReturn:
    """Charge the CPU time to tenants a few times a second, until cancelled."""
    while True:
        await asyncio.sleep(_SETTLE_SECONDS)
        bill.settle()


def _new_threads() -> ThreadPoolExecutor:
    """Let ``asyncio.to_thread`` begin new threads from now on, and return what keeps them."""
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(threads)
    return threads


def _set_at_first_signal(stopping: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # the second signal kills, even if the event loop hangs
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


CHEAP_BLOCKS: Final = 40_000
"""While no more blocks of memory are in use than this since the start (by 150 held requests of a gateway), a full pass
takes 5 to 10 ms."""
MAX_GROWTH_BLOCKS: Final = 2_000_000
"""A full pass runs at the latest when so many more blocks are in use than after the last one: some 200 MB."""
_PERIOD_SECONDS: Final = 1.0
_CHEAP_PERIODS: Final = 10
_YOUNG: Final = 700
_MIDDLE: Final = 10
_NEVER: Final = 2**31 - 1


class Heap:
    """Runs full passes of the garbage collector when they are cheap, or needed. Young objects are collected as usual.

    Requests end without cycles, so their memory does not wait for a pass: reference counts free it. A pass is for what
    libraries and rare errors leave behind.
    """

    def __init__(self, used_blocks: Callable[[], int] = sys.getallocatedblocks) -> None:
        """``used_blocks`` returns how many blocks of memory Python's objects use."""
        self._used_blocks = used_blocks
        self._blocks_at_start = self._blocks_after_pass = 0
        self._periods_since_pass = 0

    def freeze(self) -> None:
        """Exclude what exists now from all later passes, because most of it stays; and end Python's own full passes."""
        # Collected first: what is garbage now would be frozen with the rest, and would stay for the life of the
        # process.
        gc.collect()
        gc.freeze()
        # Python makes a full pass when old objects have grown by a quarter. In a gateway with 2,600 requests of 130
        # objects each, such a pass took up to 0.13 s of CPU, in which no stream got a token.
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        self._blocks_at_start = self._blocks_after_pass = self._used_blocks()

    async def run(self) -> NoReturn:
        """Look after the heap until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_SECONDS)
            self.observe()

    def observe(self) -> None:
        """Run a full pass if it is due; called once a period."""
        self._periods_since_pass += 1
        blocks = self._used_blocks()
        if blocks - self._blocks_after_pass > MAX_GROWTH_BLOCKS:
            log.info("collecting garbage, because memory has grown by %d blocks", blocks - self._blocks_after_pass)
            self._collect()
        # The number of live blocks stands for the time of a pass, which grows with it: few blocks mean that no burst is
        # on.
        elif blocks - self._blocks_at_start <= CHEAP_BLOCKS and self._is_pass_useful():
            self._collect()

    def _is_pass_useful(self) -> bool:
        """Return whether objects have become old since the last pass, and that pass is long enough ago."""
        return self._periods_since_pass >= _CHEAP_PERIODS and gc.get_count()[2] > 0

    def _collect(self) -> None:
        gc.collect()
        self._periods_since_pass = 0
        self._blocks_after_pass = self._used_blocks()
