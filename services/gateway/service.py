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
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

from .anthropic.message_routes import ERROR_FORMS as MESSAGE_ERRORS
from .api_routes import api_routes
from .gateway_settings import NUM_EDGES, GatewaySettings
from .generation.generator import Generator
from .grpc.inference_servicer import InferenceServicer
from .grpc.message_bounds import bounded
from .grpc.observed_calls import observe_calls
from .health import MeshHealth
from .http.admin_routes import AdminRoutes
from .http.app import App, Routes
from .http.browser_guard import BrowserGuard
from .http.byte_budget import ByteBudget
from .http.connections import Connections
from .http.http_server import HttpServer
from .http.json_body import BodyParser
from .http.response_counts import GRPC, OTHER, ResponseCounts
from .kserve.kserve_servicer import KServeServicer
from .ollama.ollama import ERROR_FORMS as OLLAMA_ERRORS
from .openai.completions import CompletionsApi
from .openai.openai_models import READ_FIELDS, WITHOUT_EFFECT, BodyReader
from .request_log.access_log import AccessLog
from .request_log.finished_requests import FinishedRequests
from .request_log.recent_requests import RecentRequests
from .request_log.request_routes import request_routes
from .served_mesh import ServedMesh, connect
from .tenants.api_keys import ApiKeys
from .tenants.cache_salts import CacheSalts
from .tenants.call_tenant import admit_calls
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
        self._started: tuple[ServedMesh, HttpServer, Host] | None = None
        self._parser = BodyParser(READ_FIELDS, WITHOUT_EFFECT)
        self.http_address = ""

    async def start(self, host: Host) -> None:
        """Return when a request would be answered; until then HTTP reports what is missing."""
        settings = self._settings
        keys = _load_keys(settings)
        shares = _divide(settings, keys)
        host.metrics.register(TenantMetrics(shares))
        mesh = await connect(settings, host, shares)
        counts = ResponseCounts(host.metrics)
        http = HttpServer(
            await _open_edges(settings, host, mesh, keys, shares, self._parser, counts),
            settings.http_listen,
            budget=ByteBudget(settings.max_body_bytes_in_flight),
            connections=Connections(
                for_clients(settings.max_connections, NUM_EDGES),
                settings.max_connections_per_peer,
                on_refused=partial(counts.count, OTHER),
            ),
            insecure=settings.is_open,
            tls=host.public_tls,
            descriptor=settings.http_listen_fd,
        )
        self._started = mesh, http, host
        self.http_address = http.address
        if settings.http_listen_fd is not None:  # connections wait: better than to answer that a part is missing
            await _wait_whole(mesh.health, seconds=_QUIET_SECONDS)
        await host.serve_waiting()
        host.spawn(http.serve(), name="http server")
        host.publish(http=self.http_address, model=mesh.model)
        await _wait_whole(mesh.health)
        host.spawn(mesh.health.publish(host.health), name="health of the mesh")
        scheme = "http" if settings.public_tls_cert is None else "https"
        log.info("serving %s on %s://%s", mesh.model, scheme, self.http_address)

    async def drain(self) -> None:
        """Report that the gateway leaves, send clients elsewhere, and answer what they have asked until then."""
        assert self._started is not None
        mesh, http, host = self._started
        mesh.health.draining = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_away(host, mesh.generator))
                group.create_task(http.drain(mesh.generator.end_of_present()))
            await mesh.generator.drain()
        finally:
            mesh.generator.leave_resumable()

    async def _send_away(self, host: Host, generator: Generator) -> None:
        await host.leave(self._settings.drain_timeout)
        if self._settings.http_listen_fd is not None:
            host.publish(leaving=True)  # nothing more is accepted here: the supervisor starts the next process
        if self._settings.drain == "migrate":  # now: a client that resumes makes a new connection
            generator.leave_resumable()

    async def stop(self) -> None:
        if self._started is not None:
            mesh, http, _ = self._started
            await mesh.generator.close()
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


async def _open_edges(
    settings: GatewaySettings,
    host: Host,
    mesh: ServedMesh,
    keys: ApiKeys,
    shares: TenantShares,
    parser: BodyParser,
    counts: ResponseCounts,
) -> App:
    """Add the gRPC services to the host's server and return the HTTP application. Waits for the operator's certificate
    where the admin routes need one."""
    admin_keys = ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file)
    reader = BodyReader(strict=settings.strict)
    completions = CompletionsApi(reader, mesh.model)
    finished = FinishedRequests(RecentRequests(), AccessLog(time.monotonic) if settings.access_log else None)
    host.authorize_calls(admit_calls(keys))
    host.observe_calls(observe_calls(ResponseCounts(host.metrics, GRPC), finished))
    inference = InferenceServicer(mesh.generator, mesh.health, mesh.model, mesh.plans, shares, settings.request_timeout)
    generates: dict[str, type[Message]] = dict.fromkeys(("Generate", "GenerateSession"), inference_pb2.GenerateRequest)
    generates["Resume"] = inference_pb2.InferenceResumeRequest
    generates["Cancel"] = inference_pb2.InferenceCancelRequest
    host.add_servicer(bounded(inference_pb2_grpc.add_InferenceServicer_to_server, generates), inference)
    kserve = KServeServicer(completions, mesh.generator, mesh.health, mesh.model, shares)
    infers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), grpc_service_pb2.ModelInferRequest)
    host.add_servicer(bounded(grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, infers), kserve)
    routes = api_routes(settings, host, mesh, parser, reader, completions, counts)
    guard = BrowserGuard(parse(settings.http_listen), settings.allowed_hosts, settings.cors_origins)
    admin_routes = await _admin_routes(settings, host, mesh, finished.recent)
    origins, forms = settings.cors_origins, {**MESSAGE_ERRORS, **OLLAMA_ERRORS}
    return App(routes, keys, admin_routes, admin_keys, guard, shares, origins, forms, counts=counts, finished=finished)


async def _admin_routes(settings: GatewaySettings, host: Host, mesh: ServedMesh, recent: RecentRequests) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await files.wait()
        tls = MeshTLS(files)
        channels = Channels(tls)
        host.certificates.show("operator", tls.expiry)
    return {**AdminRoutes(mesh.view, channels, settings.request_timeout).routes(), **request_routes(recent)}


async def _wait_whole(health: MeshHealth, seconds: float = math.inf) -> None:
    """Wait until no part is missing, or the time is over."""
    loop = asyncio.get_running_loop()
    logged, until = list[str](), loop.time() + seconds
    while (missing := health.missing()) and loop.time() < until:
        if missing != logged:
            log.info("waiting for %s", ", ".join(missing))
            logged = missing
        await asyncio.sleep(0.02)
