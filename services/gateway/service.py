"""Puts the gateway together: connects to the other parts, and serves the model over HTTP and on the host's gRPC
server."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from prometheus_client import Counter

from tokenloom.process.plugins import load
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime.addresses import parse
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.limits import for_clients
from tokenloom.services.runtime.peers.certificate import wait_for_files
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.services.runtime.telemetry.process_metrics import show_token_cost
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

from .batches.batches_api import Batches, absent_routes, open_batches
from .files.sound_uploads import SoundUploads
from .generation.resumable import UnattendedMetrics
from .grpc.inference_servicer import InferenceServicer
from .grpc.message_bounds import bounded, observe_calls
from .http.app import App, BrowserGuard, ClientAccess
from .http.http_exchange import HttpExchange
from .http.internal_call import InternalCalls
from .http.request_body import BodyParser
from .http.response_counts import GRPC, OTHER, ResponseCounts
from .http.route import Routes
from .http.server.connections import Connections
from .http.server.http_server import HttpServer
from .mesh.engine_calls import EngineCalls
from .metrics.gateway_metrics import count_moved, count_taken
from .metrics.usage_counts import AdapterUsage, KeyUsage
from .model_router import ModelRouter
from .openai.body_reader import WITHOUT_EFFECT, BodyReader
from .request_log.access_log import AccessLog, FinishedRequests
from .request_log.finished_request import RecentRequests
from .responses.mcp_servers import McpServers
from .responses.response_store import ResponseStore
from .routes.admin_routes import AdminRoutes, request_routes
from .routes.api_routes import ERROR_FORMS, READ_FIELDS, api_routes, status_routes, transcription_routes
from .routes.models_routes import LoraRoutes, ModelsRoutes
from .serving.fronts import Front, FrontParts, GatewayCalls, front_routes, open_fronts
from .serving.mesh_gauges import ModelRegistries
from .serving.served_mesh import MeshMetrics, ServedMesh, connect
from .serving.served_meshes import PartGauges, ServedMeshes
from .settings.gateway_settings import NUM_EDGES, GatewaySettings
from .settings.mesh_spec import MeshSpec, mesh_specs
from .tenants.api_keys import ApiKeys, PluggedKeys, admit_calls
from .tenants.tenant import MAX_SESSIONS, CacheSalts, gateway_limits
from .tenants.tenant_shares import TenantMetrics, TenantShares

if TYPE_CHECKING:
    from .http.body_files import BodyFiles
    from .http.held_table import HeldTable
    from .http.server.connection_holder import TakenConnections

log = logging.getLogger(__name__)

_FEW_CONNECTIONS = 1024
"""Fewer connections of clients than that are worth a warning, unless the operator wants so few."""
_QUIET_SECONDS = 5.0
"""How long a restarted gateway leaves connections waiting for the rest of the mesh."""


class GatewayService:
    """Fulfils :class:`tokenloom.services.runtime.host.service.Service`.

    Attributes:
        http_address: Where HTTP is served, once started.
        internal_address: Where it is served to peers; empty: nowhere.
        routes: The methods of each path that HTTP serves, once started.
    """

    def __init__(self, settings: GatewaySettings, held: "HeldTable | None" = None) -> None:
        """``held``: for the responses of this process, whose connections a holder keeps; None: it has no holder."""
        self._settings = settings
        self._held = held
        self._taking: asyncio.Task[None] | None = None
        self._started: tuple[ServedMeshes, HttpServer, Host] | None = None
        self._parser = BodyParser(READ_FIELDS, WITHOUT_EFFECT)
        self._batches: Batches | None = None
        self._internal: HttpServer | None = None
        self.http_address = self.internal_address = ""
        self.routes: Mapping[str, Collection[str]] = {}

    async def start(self, host: Host) -> None:
        """Return when a request would be answered; until then HTTP reports what is missing."""
        settings = self._settings
        keys = _load_keys(settings, host)
        shares = _divide(settings, keys)
        host.metrics.register(TenantMetrics(shares))
        connections = for_clients(settings.max_connections, NUM_EDGES)
        if connections < min(settings.max_connections, _FEW_CONNECTIONS):
            host.fall_backs.begin("few_connections", f"{connections} for HTTP and as many for gRPC")
        meshes = ServedMeshes(mesh_specs(settings))
        await _connect(meshes, settings, host, shares)
        counts, budget = ResponseCounts(host.metrics), AdmissionLimit(settings.max_body_bytes_in_flight)
        self._batches = await open_batches(settings, host, keys)
        calls = GatewayCalls()
        parts = FrontParts(calls, meshes, shares, settings.strict, settings.request_timeout)
        app = await open_servers(settings, host, parts, keys, self._parser, counts, self._batches)
        internal = InternalCalls(app, budget)
        calls.begin(internal)
        http = HttpServer(
            app,
            settings.http_listen,
            budget=budget,
            connections=Connections(
                connections,
                settings.max_connections_per_peer,
                on_refused=partial(counts.count, OTHER),
            ),
            insecure=settings.is_open,
            tls=host.public_tls,
            descriptor=settings.http_listen_fd,
        )
        counter = count_taken(host.metrics)
        taken = None if settings.hold_connections is None else self._hold(settings.hold_connections, http, counter)
        self._started = meshes, http, host
        if settings.internal_listen:
            self._internal = _peers_server(settings, host, app, budget)
            self.internal_address = self._internal.address
        self.http_address, self.routes = http.address, app.routes
        if settings.http_listen_fd is not None:  # connections wait: better than to answer that a part is missing
            await _wait_whole(meshes, seconds=_QUIET_SECONDS)
        await host.serve_waiting()
        host.spawn(http.serve(), name="http server")
        if self._internal is not None:
            host.spawn(self._internal.serve(), name="http server of peers")
        host.publish(http=self.http_address, model=meshes.names[0])
        await _wait_whole(meshes)
        if taken is not None:
            self._taking = host.spawn(taken.serve(), name="connections of other gateways")
        if self._batches is not None:
            # After the mesh is whole: lines that were refused because a part is missing would only be tried again.
            self._batches.start(internal)
        host.spawn(meshes.publish(host.health), name="health of the meshes")
        scheme = "http" if settings.public_tls_cert is None else "https"
        log.info("serving %s on %s://%s", ", ".join(meshes.names), scheme, self.http_address)
        if self._internal is not None:
            log.info("serving peers on https://%s", self.internal_address)

    async def drain(self) -> None:
        """Report that the gateway leaves, send clients elsewhere, and answer what they have asked until then."""
        assert self._started is not None
        meshes, http, host = self._started
        if self._taking is not None:
            self._taking.cancel()
        # Readiness turns false before anything is refused: load balancers learn late that a gateway leaves.
        meshes.begin_drain()
        if self._batches is not None:  # first: the next gateway waits for the directory
            await self._batches.close()
        try:
            async with asyncio.TaskGroup() as group:
                # HTTP and gRPC drain side by side: each ends when its own clients have gone, and one waits for up to
                # the drain timeout.
                group.create_task(self._send_away(host, meshes))
                group.create_task(http.drain(meshes.end_of_present()))
                if self._internal is not None:
                    group.create_task(self._internal.drain(meshes.end_of_present()))
            await meshes.drain()
        finally:
            meshes.leave_resumable()

    async def _send_away(self, host: Host, meshes: ServedMeshes) -> None:
        await host.leave(self._settings.drain_timeout)
        if self._settings.http_listen_fd is not None:
            host.publish(leaving=True)  # nothing more is accepted here: the supervisor starts the next process
        if self._settings.drain == "migrate":  # now: a client that resumes makes a new connection
            meshes.leave_resumable()

    def _hold(self, directory: Path, http: HttpServer, counter: Counter) -> "TakenConnections":
        """Store responses for other gateways, and return what takes those of others."""
        from .http.held_table import HeldTable  # here: most gateways hold nothing
        from .http.server.connection_holder import TakenConnections
        from .http.server.held_protocol import HeldProtocol

        table = self._held or HeldTable(0)
        table.port = parse(http.address).port
        http.hold(partial(HeldProtocol, table=table))
        return TakenConnections(directory, self._settings.instance_id, http.take, counter)

    async def stop(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        if self._started is not None:
            meshes, http, _ = self._started
            await meshes.close()
            await http.stop()
            if self._internal is not None:
                await self._internal.stop()
            self._started = None
        self._parser.close()


_MAX_PEERS = 256


def _peers_server(settings: GatewaySettings, host: Host, app: App, budget: AdmissionLimit) -> HttpServer:
    """Return the server of peers, which present certificates of the mesh's authority. Keys are needed there too."""

    async def answer(exchange: HttpExchange) -> None:
        exchange.is_of_peer = True
        await app(exchange)

    assert host.tls is not None, "the settings ask for certificates"
    connections = Connections(_MAX_PEERS, _MAX_PEERS)
    return HttpServer(
        answer,
        settings.internal_listen,
        budget=budget,
        connections=connections,
        insecure=False,
        tls=host.tls,
        field="internal_listen",
    )


def _load_keys(settings: GatewaySettings, host: Host) -> ApiKeys:
    salts = CacheSalts.load(settings.cache_salt_secret, settings.cache_salt_secret_file)
    if salts is None and (settings.api_key or settings.api_key_file or settings.authentication):
        salts = CacheSalts.draw()  # here, because keys that are read again must not begin with empty caches
    plugin = None
    if settings.authentication:
        assert salts is not None, "drawn above"
        plugin = PluggedKeys(settings.authentication, _plugged_keys(settings), salts)
    file = settings.api_key_file
    return _followed(host, file, lambda: ApiKeys.load(settings.api_key, file, salts, plugin))


def _plugged_keys(settings: GatewaySettings) -> Callable[[str], str | None]:
    """Return the function of the plugin. Raises ``InvalidArgument`` for one that cannot be loaded."""
    try:
        find: Callable[[str], str | None] = load("authentication", settings.authentication, settings.plugins)
    except ValueError as error:
        raise InvalidArgument(f"authentication: {error}", "authentication") from error
    return find


def _followed(host: Host, file: Path | None, load: Callable[[], ApiKeys]) -> ApiKeys:
    """Return keys that follow their file."""
    keys = load()
    if file is not None:
        host.spawn(keys.follow(file, load), name=f"keys of {file.name}")
    return keys


def _divide(settings: GatewaySettings, keys: ApiKeys) -> TenantShares:
    """Return the tenants' shares of what this gateway may do at the same time."""
    loop = asyncio.get_running_loop()
    max_live, is_shared = settings.max_live_requests, keys.are_shared
    limits = gateway_limits(
        settings.tenant_limits,
        is_shared=is_shared,
        max_live=max_live,
        max_body_bytes=settings.max_body_bytes_in_flight,
    )
    return TenantShares(
        limits,
        is_shared=is_shared,
        max_live=max_live,
        max_sessions=MAX_SESSIONS,
        max_message_bytes=settings.max_body_bytes_in_flight,
        max_media_bytes=settings.max_media_bytes_in_flight,
        max_sound_bytes=settings.max_audio_bytes_in_flight,
        clock=lambda: loop.time(),
    )


async def _connect(meshes: ServedMeshes, settings: GatewaySettings, host: Host, shares: TenantShares) -> None:
    """Connect to the meshes. Returns once one of them is connected; the others follow whenever they are there."""
    moved, unattended = count_moved(host.metrics), UnattendedMetrics(host.metrics)
    key_usage, adapter_usage = KeyUsage(host.metrics), AdapterUsage(host.metrics)
    registries = None if meshes.is_one else ModelRegistries(host.metrics)

    async def join(spec: MeshSpec) -> None:
        metrics = MeshMetrics(
            host.metrics if registries is None else registries.add(),
            moved=moved,
            unattended=unattended,
            key_usage=key_usage,
            adapter_usage=adapter_usage,
        )
        meshes.add(spec, await connect(spec, settings, host, shares, metrics))

    if meshes.is_one:
        await join(meshes.specs[0])
    else:
        for spec in meshes.specs:
            host.spawn(join(spec), name=f"connect to the mesh of {spec.names[0]}")
        await meshes.wait_connected()
    show_token_cost(host.metrics, lambda: sum(mesh.metrics.generation_tokens.value for mesh in meshes))
    host.metrics.register(PartGauges(meshes))


async def _wait_whole(meshes: ServedMeshes, seconds: float = math.inf) -> None:
    """Wait until the requests of a model are answered, or the time is over."""
    loop = asyncio.get_running_loop()
    logged, until, pause = list[str](), loop.time() + seconds, 0.001
    while (missing := meshes.missing()) and loop.time() < until:
        if missing != logged:
            log.info("waiting for %s", ", ".join(missing))
            logged = missing
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.02)  # parts that serve already tell so within milliseconds


async def open_servers(
    settings: GatewaySettings,
    host: Host,
    parts: FrontParts,
    keys: ApiKeys,
    parser: BodyParser,
    counts: ResponseCounts,
    batches: Batches | None,
) -> App:
    """Add the gRPC services to the host's server and return the HTTP application. Waits for the operator's certificate
    where the admin routes need one."""
    meshes, shares = parts.meshes, parts.shares
    admin_keys = _followed(
        host,
        settings.admin_api_key_file,
        lambda: ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file),
    )
    reader = BodyReader(strict=settings.strict)
    finished = FinishedRequests(RecentRequests(), AccessLog(time.monotonic) if settings.access_log else None)
    host.authorize_calls(admit_calls(keys))
    host.observe_calls(observe_calls(ResponseCounts(host.metrics, GRPC), finished))
    _add_inference(settings, host, meshes, shares)
    fronts = open_fronts(settings.fronts, parts, settings.plugins)
    _add_fronts(host, fronts)
    store = ResponseStore(settings.max_stored_response_bytes, is_shared=shares.is_shared)
    servers = McpServers.load(settings.mcp_servers, is_shared=shares.is_shared)
    uploads = None if batches is None else batches.uploads.finder

    def files_of(mesh: ServedMesh) -> "BodyFiles | None":
        return _files(mesh, parser, shares)

    def routes_of(mesh: ServedMesh) -> Routes:
        return api_routes(settings, host, mesh, parser, reader, store, servers, files_of(mesh), uploads)

    if meshes.is_one:
        routes = routes_of(meshes.first)
    else:
        router = ModelRouter(meshes, routes_of, max_body_bytes=settings.max_body_bytes, files_of=files_of)
        routes = {**router.routes(), **ModelsRoutes(meshes).routes()}
    routes = {**routes, **transcription_routes(settings, meshes, shares)}
    batch_routes = absent_routes() if batches is None else batches.routes
    routes = {**status_routes(settings, host, meshes, counts), **routes, **batch_routes}
    guard = BrowserGuard(parse(settings.http_listen), settings.allowed_hosts, settings.cors_origins)
    routes |= await _admin_routes(settings, host, meshes, finished.recent)
    routes |= front_routes(fronts, routes)
    access = ClientAccess(keys, admin_keys, guard, shares, settings.cors_origins)
    return App(routes, access, counts, finished, ERROR_FORMS)


def _files(mesh: ServedMesh, parser: BodyParser, shares: TenantShares) -> "BodyFiles | None":
    """Return what takes the files out of large bodies; None: the model reads text only."""
    info = mesh.tokenizers.info
    if info is None or not info.media_kinds:
        return None
    from .http.body_files import BodyFiles  # here: most models read no images

    return BodyFiles(parser, shares.media)


def _add_inference(settings: GatewaySettings, host: Host, meshes: ServedMeshes, shares: TenantShares) -> None:
    uploads = SoundUploads(settings.max_audio_bytes, shares.sounds)
    inference = InferenceServicer(meshes, shares, settings.request_timeout, uploads)
    generates: dict[str, type[Message]] = dict.fromkeys(("Generate", "GenerateSession"), inference_pb2.GenerateRequest)
    generates["Resume"] = inference_pb2.InferenceResumeRequest
    generates["Cancel"] = inference_pb2.InferenceCancelRequest
    generates["Embed"], generates["Classify"] = inference_pb2.EmbedRequest, inference_pb2.ClassifyRequest
    generates["Score"], generates["Pool"] = inference_pb2.ScoreRequest, inference_pb2.PoolRequest
    host.add_servicer(bounded(inference_pb2_grpc.add_InferenceServicer_to_server, generates), inference)


def _add_fronts(host: Host, fronts: Mapping[str, Front]) -> None:
    """Add the gRPC services of fronts. Raises ``InvalidArgument`` for one that is served already, or is none."""
    for name, front in fronts.items():
        for service in front.grpc:
            try:
                host.add_servicer(bounded(service.add, service.requests), service.servicer)
            except Exception as error:  # whatever the code of others raises
                raise InvalidArgument(f"fronts: {name}: {type(error).__name__}: {error}", "fronts") from error


async def _admin_routes(settings: GatewaySettings, host: Host, meshes: ServedMeshes, recent: RecentRequests) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await wait_for_files(files)
        tls = MeshTLS(files)
        channels = Channels(tls)
        host.certificates.show("operator", tls.expiry)
    calls = EngineCalls(channels, settings.request_timeout)
    admin, lora = AdminRoutes(meshes, calls), LoraRoutes(meshes, calls)
    return {**admin.routes(), **lora.routes(), **request_routes(recent)}
