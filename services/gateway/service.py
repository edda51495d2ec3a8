"""Puts the gateway together: connects to the other parts and serves the model over HTTP and gRPC."""

import asyncio
import logging
import math
import time
from functools import partial

from google.protobuf.message import Message

from tokenloom.services.runtime.host.descriptors import for_clients
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.addresses import parse
from tokenloom.services.runtime.peers.certificate import wait_for_files
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.services.runtime.telemetry.process_metrics import show_token_cost
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

from .anthropic.message_routes import ERROR_FORMS as MESSAGE_ERRORS
from .batches.open_batches import Batches, absent_routes, open_batches
from .gateway_settings import NUM_EDGES, GatewaySettings
from .generation.resumable import UnattendedMetrics
from .grpc.inference_servicer import InferenceServicer
from .grpc.message_bounds import bounded
from .grpc.observed_calls import observe_calls
from .http.app import App, Routes
from .http.browser_guard import BrowserGuard
from .http.byte_budget import ByteBudget
from .http.connections import Connections
from .http.http_server import HttpServer
from .http.internal_call import InternalCalls
from .http.json_body import BodyParser
from .http.response_counts import GRPC, OTHER, ResponseCounts
from .kserve.kserve_servicer import KServeServicer
from .mesh_spec import MeshSpec, mesh_specs
from .metrics import count_moved
from .model_door import ModelDoor
from .model_metrics import ModelRegistries
from .ollama.ollama import ERROR_FORMS as OLLAMA_ERRORS
from .openai.openai_models import READ_FIELDS, WITHOUT_EFFECT, BodyReader
from .part_gauges import PartGauges
from .request_log.access_log import AccessLog
from .request_log.finished_requests import FinishedRequests
from .request_log.recent_requests import RecentRequests
from .request_log.request_routes import request_routes
from .responses.response_store import ResponseStore
from .routes.admin_routes import AdminRoutes
from .routes.api_routes import api_routes, status_routes
from .routes.models_routes import ModelsRoutes
from .served_mesh import MeshMetrics, ServedMesh, connect
from .served_meshes import ServedMeshes
from .tenants.api_keys import ApiKeys
from .tenants.cache_salts import CacheSalts
from .tenants.call_tenant import admit_calls
from .tenants.key_usage import KeyUsage
from .tenants.tenant_limits import MAX_SESSIONS, gateway_limits
from .tenants.tenant_metrics import TenantMetrics
from .tenants.tenant_shares import TenantShares

log = logging.getLogger(__name__)

_QUIET_SECONDS = 5.0
"""How long a restarted gateway leaves connections waiting for the rest of the mesh."""


class GatewayService:
    """Fulfils :class:`tokenloom.services.runtime.host.service.Service`.

    Attributes:
        http_address: Where HTTP is served, once started.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._started: tuple[ServedMeshes, HttpServer, Host] | None = None
        self._parser = BodyParser(READ_FIELDS, WITHOUT_EFFECT)
        self._batches: Batches | None = None
        self.http_address = ""

    async def start(self, host: Host) -> None:
        """Return when a request would be answered; until then HTTP reports what is missing."""
        settings = self._settings
        keys = _load_keys(settings)
        shares = _divide(settings, keys)
        host.metrics.register(TenantMetrics(shares))
        meshes = ServedMeshes(mesh_specs(settings))
        await _connect(meshes, settings, host, shares)
        counts, budget = ResponseCounts(host.metrics), ByteBudget(settings.max_body_bytes_in_flight)
        self._batches = await open_batches(settings, host, keys)
        batch_routes = absent_routes() if self._batches is None else self._batches.routes
        app = await _open_edges(settings, host, meshes, keys, shares, self._parser, counts, batch_routes)
        http = HttpServer(
            app,
            settings.http_listen,
            budget=budget,
            connections=Connections(
                for_clients(settings.max_connections, NUM_EDGES),
                settings.max_connections_per_peer,
                on_refused=partial(counts.count, OTHER),
            ),
            insecure=settings.is_open,
            tls=host.public_tls,
            descriptor=settings.http_listen_fd,
        )
        self._started = meshes, http, host
        self.http_address = http.address
        if settings.http_listen_fd is not None:  # connections wait: better than to answer that a part is missing
            await _wait_whole(meshes, seconds=_QUIET_SECONDS)
        await host.serve_waiting()
        host.spawn(http.serve(), name="http server")
        host.publish(http=self.http_address, model=meshes.names[0])
        await _wait_whole(meshes)
        if self._batches is not None:
            self._batches.start(InternalCalls(app, budget))
        host.spawn(meshes.publish(host.health), name="health of the meshes")
        scheme = "http" if settings.public_tls_cert is None else "https"
        log.info("serving %s on %s://%s", ", ".join(meshes.names), scheme, self.http_address)

    async def drain(self) -> None:
        """Report that the gateway leaves, send clients elsewhere, and answer what they have asked until then."""
        assert self._started is not None
        meshes, http, host = self._started
        meshes.begin_drain()
        if self._batches is not None:  # first: the next gateway waits for the directory
            await self._batches.close()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_away(host, meshes))
                group.create_task(http.drain(meshes.end_of_present()))
            await meshes.drain()
        finally:
            meshes.leave_resumable()

    async def _send_away(self, host: Host, meshes: ServedMeshes) -> None:
        await host.leave(self._settings.drain_timeout)
        if self._settings.http_listen_fd is not None:
            host.publish(leaving=True)  # nothing more is accepted here: the supervisor starts the next process
        if self._settings.drain == "migrate":  # now: a client that resumes makes a new connection
            meshes.leave_resumable()

    async def stop(self) -> None:
        if self._batches is not None:
            await self._batches.close()
        if self._started is not None:
            meshes, http, _ = self._started
            await meshes.close()
            await http.stop()
            self._started = None
        self._parser.close()


def _load_keys(settings: GatewaySettings) -> ApiKeys:
    salts = CacheSalts.load(settings.cache_salt_secret, settings.cache_salt_secret_file)
    return ApiKeys.load(settings.api_key, settings.api_key_file, salts)


def _divide(settings: GatewaySettings, keys: ApiKeys) -> TenantShares:
    """Return the tenants' shares of what this gateway may do at the same time."""
    loop = asyncio.get_running_loop()
    max_live, is_shared = settings.max_live_requests, keys.num_tenants > 1
    limits = gateway_limits(
        settings.tenant_limits,
        is_shared=is_shared,
        max_live=max_live,
        max_body_bytes=settings.max_body_bytes_in_flight,
    )
    return TenantShares(
        limits, is_shared=is_shared, max_live=max_live, max_sessions=MAX_SESSIONS, clock=lambda: loop.time()
    )


async def _connect(meshes: ServedMeshes, settings: GatewaySettings, host: Host, shares: TenantShares) -> None:
    """Connect to the meshes. Returns once one of them is connected; the others follow whenever they are there."""
    shared = count_moved(host.metrics), UnattendedMetrics(host.metrics), KeyUsage(host.metrics)
    registries = None if meshes.is_one else ModelRegistries(host.metrics)

    async def join(spec: MeshSpec) -> None:
        metrics = MeshMetrics(host.metrics if registries is None else registries.add(), *shared)
        meshes.add(spec, await connect(spec, settings, host, shares, metrics))

    if meshes.is_one:
        await join(meshes.specs[0])
    else:
        for spec in meshes.specs:
            host.spawn(join(spec), name=f"connect to the mesh of {spec.names[0]}")
        await meshes.wait_connected()
    show_token_cost(host.metrics, lambda: sum(mesh.metrics.generation_tokens.value for mesh in meshes))
    host.metrics.register(PartGauges(meshes))


async def _open_edges(
    settings: GatewaySettings,
    host: Host,
    meshes: ServedMeshes,
    keys: ApiKeys,
    shares: TenantShares,
    parser: BodyParser,
    counts: ResponseCounts,
    batch_routes: Routes,
) -> App:
    """Add the gRPC services to the host's server and return the HTTP application. Waits for the operator's certificate
    where the admin routes need one."""
    admin_keys = ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file)
    reader = BodyReader(strict=settings.strict)
    finished = FinishedRequests(RecentRequests(), AccessLog(time.monotonic) if settings.access_log else None)
    host.authorize_calls(admit_calls(keys))
    host.observe_calls(observe_calls(ResponseCounts(host.metrics, GRPC), finished))
    _add_grpc_services(settings, host, meshes, shares, reader)
    store = ResponseStore(settings.max_stored_response_bytes)

    def routes_of(mesh: ServedMesh) -> Routes:
        return api_routes(settings, host, mesh, parser, reader, store)

    if meshes.is_one:
        routes = routes_of(meshes.first)
    else:
        door = ModelDoor(meshes, routes_of, max_body_bytes=settings.max_body_bytes)
        routes = {**door.routes(), **ModelsRoutes(meshes).routes()}
    routes = {**status_routes(settings, host, meshes, counts), **routes, **batch_routes}
    guard = BrowserGuard(parse(settings.http_listen), settings.allowed_hosts, settings.cors_origins)
    admin_routes = await _admin_routes(settings, host, meshes, finished.recent)
    origins, forms = settings.cors_origins, {**MESSAGE_ERRORS, **OLLAMA_ERRORS}
    return App(routes, keys, admin_routes, admin_keys, guard, shares, origins, forms, counts=counts, finished=finished)


def _add_grpc_services(
    settings: GatewaySettings, host: Host, meshes: ServedMeshes, shares: TenantShares, reader: BodyReader
) -> None:
    inference = InferenceServicer(meshes, shares, settings.request_timeout)
    generates: dict[str, type[Message]] = dict.fromkeys(("Generate", "GenerateSession"), inference_pb2.GenerateRequest)
    generates["Resume"] = inference_pb2.InferenceResumeRequest
    generates["Cancel"] = inference_pb2.InferenceCancelRequest
    host.add_servicer(bounded(inference_pb2_grpc.add_InferenceServicer_to_server, generates), inference)
    kserve = KServeServicer(reader, meshes, shares)
    infers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), grpc_service_pb2.ModelInferRequest)
    host.add_servicer(bounded(grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, infers), kserve)


async def _admin_routes(settings: GatewaySettings, host: Host, meshes: ServedMeshes, recent: RecentRequests) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await wait_for_files(files)
        tls = MeshTLS(files)
        channels = Channels(tls)
        host.certificates.show("operator", tls.expiry)
    return {**AdminRoutes(meshes, channels, settings.request_timeout).routes(), **request_routes(recent)}


async def _wait_whole(meshes: ServedMeshes, seconds: float = math.inf) -> None:
    """Wait until the requests of a model are answered, or the time is over."""
    loop = asyncio.get_running_loop()
    logged, until = list[str](), loop.time() + seconds
    while (missing := meshes.missing()) and loop.time() < until:
        if missing != logged:
            log.info("waiting for %s", ", ".join(missing))
            logged = missing
        await asyncio.sleep(0.02)
