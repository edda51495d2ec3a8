"""What a running service stands on: one port, health, metrics, background tasks and the state file."""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tokenloom.process.fall_backs import OF_PROCESS, FallBacks
from tokenloom.process.plugins import described
from tokenloom.request.errors import TokenloomError, Unavailable

from ..addresses import CHANGED_SUFFIX, draft_of
from ..peers.callers import check_caller
from ..peers.certificate import wait_for_files
from ..peers.tls import MeshTLS, PublicTLS
from ..tasks import Failure, Tasks
from ..telemetry import metrics_server, process_metrics
from ..telemetry.tracing import Tracer
from .health import Health
from .host_dependencies import HostDependencies
from .service_settings import ServiceSettings
from .servicer_edge import Authorize, Edge, ObserveCall, OutsideCalls

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill


class StateFile:
    """Keeps the published fields, and writes them to the file if there is one. Each time the supervisor is notified."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._fields: dict[str, object] = {}
        self._is_left = False

    def publish(self, **fields: object) -> None:
        """Add fields and replace the file. Raises ``Unavailable`` when it cannot be written.

        Nothing is written any more once the file says that this process is leaving: the next one may have written it.
        """
        self._fields |= fields
        if self._path is None or self._is_left:
            return
        # Replaced as a whole: the supervisor and `tokenloom ps` read the file at any moment and must not see half of
        # it.
        draft = draft_of(self._path, os.getpid())
        try:
            draft.write_text(json.dumps(self._fields))
            draft.replace(self._path)
        except OSError as error:
            raise Unavailable(f"state_file: cannot write {self._path}: {error.strerror}") from None
        self._is_left = bool(self._fields.get("leaving"))
        # Where nobody listens this fails, and where many such datagrams wait: the file is read after the last one.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as teller:
            teller.setblocking(False)
            teller.sendto(b"", str(self._path.with_suffix(CHANGED_SUFFIX)))

    def remove(self) -> None:
        """Remove the file, unless a successor has written its own; nothing is written any more. Idempotent."""
        if (path := self._path) is None:
            return
        self._path = None
        with contextlib.suppress(OSError, ValueError):
            # With `--drain finish` the successor of a gateway starts while this process still drains, and writes the
            # same file.
            if json.loads(path.read_text()).get("pid") == self._fields.get("pid"):
                path.unlink(missing_ok=True)


log = logging.getLogger(__name__)

_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0
"""Seconds until the state file is written once more: doubled each time, because each failure is a line of the log."""
_Servicer = TypeVar("_Servicer")


class Host:
    """Given to a service at its start.

    Attributes:
        settings: The service's settings.
        epoch: Random 64-bit incarnation of this process.
        address: Where gRPC is served: ``host:port`` or ``unix:/path``.
        health_address: Where probes are answered in plain text.
        metrics_address: ``host:port`` of /metrics; empty when off.
        metrics: The registry behind /metrics.
        health: grpc.health.v1.
        channels: Opens channels to other services.
        network: Makes this process's sockets.
        random: Draws epochs, ids, seeds and leases.
        clock: Measures durations.
        tls: This process's certificate; None: the mesh has none.
        public_tls: A public service's certificate for its clients; None: it serves plain text.
        certificates: When each certificate expires.
        tracer: Sends spans; None: no tracing.
        failure: The first error that ends the service.
        fall_backs: What this process does without; metrics and the state file show it.
        bill: Shares out this process's CPU time; None without ``--bill``.
        billed_apart: Returns the id of a child that shares its own CPU time out; None: there is none.
    """

    def __init__(self, settings: ServiceSettings, surroundings: HostDependencies | None = None) -> None:
        """``surroundings``: None for those of a real process."""
        surroundings = surroundings or HostDependencies()
        self.settings = settings
        self.network, self.random, self.clock = surroundings.network, surroundings.random, surroundings.clock
        self.epoch = self.random.getrandbits(64) or 1  # zero means "any" in a Hello
        self.address = self.health_address = self.metrics_address = ""
        self.metrics = process_metrics.new_registry()
        self.health = Health(self._publish_serving)
        process_metrics.observe_part(self.metrics, settings.service, settings.instance_id, lambda: self.health.serving)
        self.tls: MeshTLS | None = None
        self.public_tls: PublicTLS | None = None
        self.certificates = process_metrics.CertificateExpiries(self.metrics)
        self.tracer = (
            Tracer(settings.otlp_endpoint, settings.service, settings.instance_id) if settings.otlp_endpoint else None
        )
        self.channels = self.network.channels()
        self.failure = Failure()
        # The gateway's clients show API keys and have no certificate of the mesh, so its edge checks no callers.
        checks_callers = settings.certificate is not None and not settings.is_public
        # A public service's requests have spans of their own, which know more.
        tracer, outside = self.tracer, None
        if settings.is_public:
            tracer, outside = None, OutsideCalls(settings.grpc_limits.calls)
        self._edge = Edge(check_caller if checks_callers else None, tracer, outside)
        self._listener = self.network.listener(settings, self._edge)
        self._metrics_server: metrics_server.MetricsServer | None = None
        self._tasks = Tasks(self.failed)
        self._state = StateFile(settings.state_file)
        self._loop: asyncio.AbstractEventLoop | None = None  # while the state file has the addresses
        self._is_publishing = False
        self._retry: asyncio.TimerHandle | None = None
        self.fall_backs = FallBacks(self.publish_fall_backs, beside=OF_PROCESS)
        process_metrics.observe_fall_backs(self.metrics, self.fall_backs)
        self.billed_apart: Callable[[], int | None] = lambda: None
        self.bill: CpuBill | None = None
        if settings.bill:
            self.bills = process_metrics.BillMetrics(self.metrics)
            self.bill = process_metrics.open_bill(settings.service, self.bills, lambda: self.billed_apart())

    def add_servicer(self, add: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
        """Serve a servicer, also while the server runs. ``add``: the generated ``add_…Servicer_to_server``."""
        self._edge.add_servicer(add, servicer)

    def authorize_calls(self, authorize: Authorize) -> None:
        """Call ``authorize`` before every call except health checks; it raises for one that is not admitted."""
        self._edge.authorize = authorize

    def observe_calls(self, observe: ObserveCall) -> None:
        """Observe the calls of the servicers that are added from now on, and refused ones, except health checks."""
        self._edge.observe = observe

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> "asyncio.Task[Any]":
        """Start a task that lives at most as long as the host; when it fails, the service fails."""
        return self._tasks.spawn(coro, name=name)

    def failed(self, error: BaseException) -> None:
        """Report an error that the service cannot survive: it stops, and the process exits with status 1."""
        if not self.failure.happened:
            # Our own errors are no bugs: their message is enough.
            log.error("failed: %s", error, exc_info=None if isinstance(error, TokenloomError) else error)
            self.failure.set(error)

    def publish(self, **fields: object) -> None:
        """Add fields (an HTTP address, a role) to the state file and write it.

        Raises ``Unavailable`` when it cannot be written, until the service is ready. Afterwards that is only logged,
        and the next call writes these fields too: a full disk must not end requests, nor what reports a fall-back.
        """
        try:
            self._state.publish(**fields)
        except Unavailable as error:
            if not self._edge.is_ready:
                raise
            log.warning("%s", error.message)

    def _publish_serving(self, delay: float = 0.0) -> None:
        """Write whether the service is SERVING, until that succeeds: the supervisor waits for it. ``delay``: seconds
        that this attempt has waited."""
        if self._loop is None:  # `publish_addresses` will
            return
        if self._retry is not None:
            self._retry.cancel()
        try:
            self._state.publish(serving=self.health.serving)
        except Unavailable as error:
            log.warning("%s", error.message)
            delay = min(2 * delay, _LONGEST_RETRY) or _FIRST_RETRY
            self._retry = self._loop.call_later(delay, self._publish_serving, delay)

    def publish_fall_backs(self) -> None:
        """Write the fall-backs to the state file soon, from any thread: those of a thousand engines, which begin at
        once, are written once."""
        if (loop := self._loop) is not None and not self._is_publishing:
            self._is_publishing = True
            loop.call_soon_threadsafe(self._write_fall_backs)

    def _write_fall_backs(self) -> None:
        self._is_publishing = False
        try:
            self.publish(fall_backs=[each._asdict() for each in self.fall_backs.active])
        except Unavailable as error:  # on a full disk: the service goes on without the sign
            log.warning("fall-backs are not shown by `tokenloom ps`: %s", error.message)

    async def open(self) -> None:
        """Bind, and serve health checks with NOT_SERVING."""
        await self.prepare()
        await self.listen()

    async def prepare(self) -> None:
        """Do all of :meth:`open` except to listen for gRPC: health is served if it has a port of its own."""
        settings = self.settings
        # Before anything listens: with certificates every port speaks TLS, /metrics included where other machines reach
        # it.
        if (files := settings.certificate) is not None:
            await wait_for_files(files)
            self.tls = MeshTLS(files)
            self.channels = self.network.channels(self.tls)
            self.certificates.show("mesh", self.tls.expiry)
            self.certificates.show("authority", self.tls.ca_expiry)
        if (files := settings.public_certificate) is not None:
            self.public_tls = PublicTLS(files)
            self.certificates.show("public", self.public_tls.expiry)
        await self.health.start(self._edge)
        if settings.health_listen:
            self.health_address = await self.health.serve_probes(settings.health_listen)
        if settings.metrics_listen:
            self._metrics_server = metrics_server.serve(
                self.metrics, settings.metrics_listen, self.tls, insecure=settings.insecure
            )
            self.metrics_address = self._metrics_server.address

    async def listen(self) -> None:
        """Listen for gRPC, after :meth:`prepare`."""
        self.address = await self._listener.open(self.tls, self.public_tls)
        self.health_address = self.health_address or self.address
        self.publish_addresses()

    def publish_addresses(self) -> None:
        """Write what is known of this process to the state file: its name, process and addresses."""
        settings, self._loop = self.settings, asyncio.get_running_loop()
        self.publish(
            service=settings.service,
            instance_id=settings.instance_id,
            pid=os.getpid(),
            epoch=self.epoch,
            address=self.address,
            metrics=self.metrics_address,
            health=self.health_address,
            serving=self.health.serving,
            certificate="" if settings.public_certificate is None else str(settings.public_certificate.cert.absolute()),
            fall_backs=[each._asdict() for each in self.fall_backs.active],
            plugins=described(settings.plugins),
        )

    async def serve_waiting(self) -> None:
        """Serve the connections that wait in an inherited socket; :meth:`ready` does it at the latest. Idempotent."""
        await self._listener.serve()

    async def leave(self, grace: float) -> None:
        """Accept no more gRPC connections, and send the clients of the open ones elsewhere for their next calls.

        ``grace``: seconds that calls in progress have to end. Returns when the clients have been asked to leave.
        """
        await self._listener.leave(grace)

    async def ready(self) -> None:
        """Set SERVING under the names of all servicers that were added, and describe them by reflection."""
        # From here on an unknown service is UNIMPLEMENTED. Before, it may only not have been added yet, and a caller
        # that got UNIMPLEMENTED would take this process for one of an older release.
        self._edge.is_ready = True
        names = list(self._edge.services)
        reflected = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME])
        self.add_servicer(reflection_pb2_grpc.add_ServerReflectionServicer_to_server, reflected)
        # Before SERVING is published: connections that waited in the held socket are older than any that a probe lets
        # in.
        await self.serve_waiting()
        # A task may have failed during the start. SERVING would bring requests to a process that is about to end.
        await self.health.set_serving(not self.failure.happened, names)

    def begin_stop(self) -> None:
        """Note that the service is about to stop: a call that it cannot complete any more is to be made elsewhere."""
        self._edge.ends.is_stopping = True

    async def close(self, grace: float) -> None:
        """End calls after ``grace`` seconds, then tasks, metrics and the state file."""
        await self._listener.close(grace)
        await self.health.close()
        await self._tasks.close()
        if self._metrics_server is not None:
            # Metrics close after the calls have ended, so that a last scrape can still see what the drain did.
            await asyncio.to_thread(self._metrics_server.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        self._loop = None
        self._state.remove()
