"""What a running service stands on: the gRPC server, health, metrics, background tasks and the state file."""

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tokenloom.request.errors import TokenloomError, Unavailable

from ..local_streams import sockets
from ..local_streams.server import LocalServer
from ..peers import addresses
from ..peers.callers import check_caller
from ..peers.channels import MAX_MESSAGE_BYTES, Channels
from ..peers.tls import MeshTLS
from ..telemetry import process_metrics
from ..telemetry.tracing import Tracer
from .health import Health
from .service_settings import ServiceSettings
from .servicer_edge import Authorize, Edge
from .tasks import Tasks

log = logging.getLogger(__name__)

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.ping_timeout_ms", 1500),
    # Without it our clients' pings end in GOAWAY too_many_pings, which kills every call.
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
]


class Host:
    """Given to a service at its start.

    Attributes:
        settings: The service's.
        epoch: Random 64-bit incarnation of this process.
        server: Takes servicers, also while it already runs.
        address: Where the server listens: ``host:port`` or ``unix:/path``.
        health_address: Where probes are answered in plain text.
        metrics_address: ``host:port`` of /metrics; empty when off.
        metrics: The registry behind it.
        health: grpc.health.v1.
        channels: To other parts of the mesh.
        tls: This part's certificate; None: the mesh has none.
        tracer: Where spans go; None: nowhere.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(64) or 1  # zero means "any" in a Hello
        self.metrics = process_metrics.new_registry()
        self.health = Health()
        process_metrics.observe_part(self.metrics, settings.service, settings.instance_id, lambda: self.health.serving)
        self.address = ""
        self.health_address = ""
        self.metrics_address = ""
        self.tls: MeshTLS | None = None
        self.tracer = _open_tracer(settings)
        self.channels = Channels()
        self._ready = False
        checks_callers = settings.certificate is not None and not settings.is_public
        self._edge = Edge(lambda: self._ready, check_caller if checks_callers else None, self._call_tracer)
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", settings.max_message_bytes)]
        self._grpc = grpc.aio.server(options=options, interceptors=[self._edge])
        self._probes: grpc.aio.Server | None = None
        self._servicers = _Servicers(self._grpc)
        self._local: LocalServer | None = None
        self._metrics_server: process_metrics.MetricsServer | None = None
        self._tasks = Tasks(self.failed)
        self._failure: BaseException | None = None
        self._failure_seen = False
        self._failed = asyncio.Event()
        self._state: dict[str, object] = {}

    @property
    def server(self) -> grpc.aio.Server:
        return cast(grpc.aio.Server, self._servicers)

    def authorize_calls(self, authorize: Authorize) -> None:
        """From now on every call, but health checks, needs ``authorize`` to return."""
        self._edge.authorize = authorize

    @property
    def _call_tracer(self) -> Tracer | None:
        """Of calls from other parts; a public part's requests have spans that know more."""
        return None if self.settings.is_public else self.tracer

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str) -> "asyncio.Task[Any]":
        """Starts a task that lives at most as long as the host; when it fails, the process does."""
        return self._tasks.spawn(coro, name=name)

    def failed(self, error: BaseException) -> None:
        """Reports what the service cannot go on without: it ends, the process with status 1."""
        if self._failure is None:
            # Our own errors are no bugs: their words are enough.
            log.error("failed: %s", error, exc_info=None if isinstance(error, TokenloomError) else error)
            self._failure = error
            self._failed.set()

    async def wait_failed(self) -> BaseException:
        """Returns the first failure once there is one, which then counts as seen."""
        await self._failed.wait()
        assert self._failure is not None
        self._failure_seen = True
        return self._failure

    async def until_failed(self) -> None:
        """Returns once there is a failure."""
        await self._failed.wait()

    def raise_unseen_failure(self) -> None:
        if self._failure is not None and not self._failure_seen:
            raise self._failure

    def publish(self, **fields: object) -> None:
        """Adds fields to the state file (an HTTP address, a role), and writes it."""
        self._state |= fields
        if (path := self.settings.state_file) is not None:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                draft.write_text(json.dumps(self._state))
                draft.replace(path)
            except OSError as error:
                raise Unavailable(f"state_file: cannot write {path}: {error.strerror}") from None

    async def open(self) -> None:
        """Binds and serves health, NOT_SERVING."""
        if (files := self.settings.certificate) is not None:
            await files.wait()
            self.tls = MeshTLS(files)
            self.channels = Channels(self.tls)
        await self.health.start(self.server)
        self._local = await self._serve_locally()  # before gRPC: who finds that finds this
        self.address = self._bind()
        await self._grpc.start()
        self.health_address = await self._serve_probes() if self.settings.health_listen else self.address
        if self.settings.metrics_listen:
            self._metrics_server = self._bind_metrics()
            self.metrics_address = self._metrics_server.address
        self.publish(
            service=self.settings.service,
            instance_id=self.settings.instance_id,
            pid=os.getpid(),
            epoch=self.epoch,
            address=self.address,
            metrics=self.metrics_address,
            health=self.health_address,
        )

    async def ready(self) -> None:
        """SERVING, under the names of all servicers that were added; reflection knows them too."""
        self._ready = True
        names = list(self._servicers.names)
        reflected = reflection.aio.ReflectionServicer([*names, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, self.server)
        self.health.add_names(names)
        await self.health.set_serving(not self.has_failed)

    async def close(self, grace: float) -> None:
        """Ends calls after ``grace`` seconds, then tasks, metrics and the state file."""
        await self._end_calls(grace)
        if self._probes is not None:
            await self._probes.stop(None)
        await self._tasks.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)
        if self.settings.state_file is not None:
            self.settings.state_file.unlink(missing_ok=True)

    async def _end_calls(self, grace: float) -> None:
        if self._local is not None:
            await self._local.close(grace)
        await self._grpc.stop(grace)

    def _bind(self) -> str:
        settings = self.settings
        if settings.is_public:
            return bind(
                self._grpc,
                settings.listen,
                settings.public_credentials(),
                insecure=settings.is_open,
                remedy="give --public-tls-cert or an API key",
            )
        credentials = self.tls.server_credentials() if self.tls is not None else None
        return bind(self._grpc, settings.listen, credentials, insecure=settings.insecure)

    async def _serve_locally(self) -> LocalServer | None:
        """Streams for parts of this host; None where peers need certificates, or are none of ours."""
        settings = self.settings
        path = sockets.path_beside(settings.listen)
        if path is None or self.tls is not None or settings.is_public:
            return None
        server = LocalServer(path, self._find_handler, settings.max_message_bytes)
        try:
            await server.open()
        except OSError as error:
            raise Unavailable(f"listen: cannot bind {path}: {error.strerror}") from None
        return server

    async def _find_handler(self, method: str) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Past the same edge as gRPC's calls."""
        return await self._edge.intercept_service(self._servicers.find, _CallDetails(method))

    async def _serve_probes(self) -> str:
        """kubelet's probes carry no certificate: a port that answers nothing else."""
        self._probes = grpc.aio.server(options=SERVER_OPTIONS)
        self.health.serve_on(self._probes)
        address = bind(self._probes, self.settings.health_listen, None, insecure=True, field="health_listen")
        await self._probes.start()
        return address

    def _bind_metrics(self) -> process_metrics.MetricsServer:
        address = addresses.parse(self.settings.metrics_listen, field="metrics_listen")
        context = self.tls.server_context() if self.tls is not None and not address.is_local else None
        addresses.check_closed(address, insecure=self.settings.insecure or context is not None, field="metrics_listen")
        try:
            return process_metrics.MetricsServer(self.metrics, address, context)
        except OSError as error:
            raise Unavailable(f"metrics_listen: cannot bind {address}: {error.strerror}") from None


def bind(
    server: grpc.aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None,
    *,
    insecure: bool,
    field: str = "listen",
    remedy: str = "give --tls-cert",
) -> str:
    """Adds a port to a server; returns its address. ``credentials`` None: plain text.

    Raises ``InvalidArgument`` for one that other machines can reach in plain text, unless ``insecure`` allows it,
    ``Unavailable`` for one that cannot be had.
    """
    address = addresses.parse(listen, field=field)
    try:
        if credentials is not None:
            port = server.add_secure_port(str(address), credentials)
        else:
            addresses.check_closed(address, insecure=insecure, field=field, remedy=remedy)
            port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise Unavailable(f"{field}: cannot bind {address}; is it taken, or its folder missing?") from None
    return str(address) if address.path else str(addresses.Address(host=address.host, port=port))


@dataclass(slots=True)
class _CallDetails:
    """Of a call that did not come through gRPC; in all else ``grpc.HandlerCallDetails``."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class _Servicers:
    """Passes servicers on to a server and notes their names, which health and reflection tell, and their handlers."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self._handlers: list[grpc.GenericRpcHandler] = []
        self.names: list[str] = []

    async def find(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call, as gRPC would find it."""
        return next((found for each in self._handlers if (found := each.service(details)) is not None), None)

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._handlers += handlers
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler) and (name := handler.service_name()):
                self.names.append(name)
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: dict[str, Any]) -> None:
        """Does nothing: gRPC refuses this faster registration once a server runs, and the generic one is enough."""


def _open_tracer(settings: ServiceSettings) -> Tracer | None:
    if not settings.otlp_endpoint:
        return None
    from ..telemetry.otlp import OtlpTracer  # several MB, for those who trace

    return OtlpTracer(settings.otlp_endpoint, settings.service, settings.instance_id)
