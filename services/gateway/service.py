"""Puts the gateway together: connects to the other parts and serves the model over HTTP and gRPC."""

import asyncio
import logging
import math
from dataclasses import dataclass

from google.protobuf.message import Message

from tokenloom.request.reasoning import ReasoningFormat, ReasoningMarks, marks_of
from tokenloom.services.runtime.host.descriptors import for_clients
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.addresses import parse
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import Members
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

from .anthropic.count_tokens import CountTokens
from .anthropic.message_routes import ERROR_FORMS, message_routes
from .anthropic.messages import MessagesApi
from .assistant.message_plans import MessagePlans
from .gateway_settings import NUM_EDGES, GatewaySettings
from .generation.admission import Admission
from .generation.backlog import Backlog
from .generation.generator import Generator
from .generation.resumable import ResumableRequests, UnattendedMetrics
from .grpc.inference_servicer import InferenceServicer
from .grpc.message_bounds import bounded
from .health import MeshHealth
from .http.admin_routes import AdminRoutes
from .http.app import App, Routes
from .http.browser_guard import BrowserGuard
from .http.byte_budget import ByteBudget
from .http.connections import Connections
from .http.endpoint import Api, Endpoint
from .http.http_server import HttpServer
from .http.json_body import BodyParser
from .http.status_routes import StatusRoutes
from .http.tokenize_routes import TokenizeRoutes
from .http.turn_share import ANSWERS_PER_TURN, TurnShare
from .kserve.kserve_servicer import KServeServicer
from .mesh.mesh_view import MeshView
from .mesh.output_pool import OutputPool
from .mesh.tokenizer_client import TokenizerClient
from .metrics import GatewayMetrics, MeshGauges, count_moved
from .openai.chat import ChatApi
from .openai.completions import CompletionsApi
from .openai.openai_models import READ_FIELDS, WITHOUT_EFFECT, BodyReader
from .openapi.openapi_routes import document_routes
from .tenants.api_keys import ApiKeys
from .tenants.cache_salts import CacheSalts
from .tenants.call_tenant import admit_calls
from .tenants.tenant_limits import MAX_SESSIONS, gateway_limits
from .tenants.tenant_metrics import TenantMetrics
from .tenants.tenant_shares import TenantShares

log = logging.getLogger(__name__)

_QUIET_SECONDS = 5.0
"""How long a restarted gateway leaves connections waiting for the rest of the mesh."""


@dataclass(frozen=True, slots=True)
class _Mesh:
    """Holds what the edges serve: one model, and what a request to it needs."""

    model: str
    """Its name for clients."""
    plans: MessagePlans
    generator: Generator
    tokenizers: TokenizerClient
    view: MeshView
    health: MeshHealth


class GatewayService:
    """Fulfils :class:`tokenloom.services.runtime.host.service.Service`.

    Attributes:
        http_address: Where HTTP is served, once started.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._started: tuple[_Mesh, HttpServer, Host] | None = None
        self._parser = BodyParser(READ_FIELDS, WITHOUT_EFFECT)
        self.http_address = ""

    async def start(self, host: Host) -> None:
        """Return when a request would be answered; until then HTTP reports what is missing."""
        settings = self._settings
        keys = _load_keys(settings)
        shares = _divide(settings, keys)
        host.metrics.register(TenantMetrics(shares))
        mesh = await _connect(settings, host, shares)
        http = HttpServer(
            await _open_edges(settings, host, mesh, keys, shares, self._parser),
            settings.http_listen,
            budget=ByteBudget(settings.max_body_bytes_in_flight),
            connections=Connections(
                for_clients(settings.max_connections, NUM_EDGES), settings.max_connections_per_peer
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


async def _connect(settings: GatewaySettings, host: Host, shares: TenantShares) -> _Mesh:
    """Connect to the other parts. Returns once a tokenizer has reported which model it serves."""
    tokenizers = TokenizerClient(Members(settings.tokenizers), host.channels)
    view = MeshView(settings.coordinator, host.channels)
    outputs = OutputPool(
        Members(settings.output_processors),
        settings.instance_id,
        host.epoch,
        host.channels,
        max_kept_bytes=settings.max_kept_prompt_bytes,
        on_moved=count_moved(host.metrics).inc,
    )
    health = MeshHealth(tokenizers, outputs, view)
    host.spawn(tokenizers.run(), name="tokenizer probes")
    host.spawn(view.run(), name="coordinator watch")
    info = await tokenizers.wait_known()
    backlog = Backlog(settings.max_queue_seconds, host.random, always_queued=settings.always_queued)
    view.follow_capacity(info.fingerprint, backlog.observe)
    outputs.start(host, info.fingerprint)
    model = settings.served_model_name or info.fingerprint.model
    host.metrics.register(MeshGauges(view, health, backlog, model))
    plans = MessagePlans.choose(settings.tool_call_parser, settings.reasoning_parser, info)
    generator = Generator(
        tokenizers,
        view,
        outputs,
        GatewayMetrics(host.metrics, model),
        Admission(shares, backlog, settings.most_urgent_priority),
        ResumableRequests(settings.keep_disconnected_requests, UnattendedMetrics(host.metrics), host.failed),
        default_timeout=settings.request_timeout,
        most_urgent_priority=settings.most_urgent_priority,
        max_request_values=settings.max_request_values,
        tracer=host.tracer,
        model=model,
        reasoning_marks=None if plans.reasoning is None else await _marks(plans.reasoning, tokenizers),
        random=host.random,
        clock=host.clock.nanoseconds,
    )
    return _Mesh(model, plans, generator, tokenizers, view, health)


async def _marks(reasoning: ReasoningFormat, tokenizers: TokenizerClient) -> ReasoningMarks | None:
    """Return the marks of the model's reasoning as tokens; None if the tokenizer has no tokens for them."""
    texts = (reasoning.start, reasoning.end)
    encoded = await tokenizers.encode(texts, add_special_tokens=False)
    tokens = {text: list(prompt.token_ids) for text, prompt in zip(texts, encoded.prompts, strict=True)}
    return marks_of(reasoning, tokens.__getitem__) if all(tokens.values()) else None


async def _open_edges(
    settings: GatewaySettings, host: Host, mesh: _Mesh, keys: ApiKeys, shares: TenantShares, parser: BodyParser
) -> App:
    """Add the gRPC services to the host's server and return the HTTP application. Waits for the operator's certificate
    where the admin routes need one."""
    admin_keys = ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file)
    reader = BodyReader(strict=settings.strict)
    completions = CompletionsApi(reader, mesh.model)
    host.authorize_calls(admit_calls(keys))
    inference = InferenceServicer(mesh.generator, mesh.health, mesh.model, mesh.plans, shares, settings.request_timeout)
    generates: dict[str, type[Message]] = dict.fromkeys(("Generate", "GenerateSession"), inference_pb2.GenerateRequest)
    generates["Resume"] = inference_pb2.InferenceResumeRequest
    generates["Cancel"] = inference_pb2.InferenceCancelRequest
    host.add_servicer(bounded(inference_pb2_grpc.add_InferenceServicer_to_server, generates), inference)
    kserve = KServeServicer(completions, mesh.generator, mesh.health, mesh.model, shares)
    infers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), grpc_service_pb2.ModelInferRequest)
    host.add_servicer(bounded(grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, infers), kserve)
    routes = _routes(settings, host, mesh, parser, reader, completions)
    guard = BrowserGuard(parse(settings.http_listen), settings.allowed_hosts, settings.cors_origins)
    admin_routes = await _admin_routes(settings, host, mesh)
    return App(routes, keys, admin_routes, admin_keys, guard, shares, settings.cors_origins, ERROR_FORMS)


def _routes(
    settings: GatewaySettings,
    host: Host,
    mesh: _Mesh,
    parser: BodyParser,
    reader: BodyReader,
    completions: CompletionsApi,
) -> Routes:
    limit, timeout, answers = settings.max_body_bytes, settings.request_timeout, TurnShare(ANSWERS_PER_TURN)
    chats = ChatApi(reader, mesh.model, mesh.plans)
    messages = MessagesApi(reader, chats, mesh.model)
    tokenize = TokenizeRoutes(parser, reader, mesh.tokenizers, mesh.health, mesh.model, limit, timeout)
    count_tokens = CountTokens(parser, reader, mesh.tokenizers, mesh.model, limit, timeout)

    def endpoint(api: Api) -> Endpoint:
        return Endpoint(api, mesh.generator, mesh.model, parser, limit, answers)

    return {
        **StatusRoutes(mesh.health, mesh.view, mesh.generator, host.metrics, mesh.model).routes(),
        **document_routes(mesh.health, admin=settings.has_admin),
        "/v1/chat/completions": {"POST": endpoint(chats)},
        "/v1/completions": {"POST": endpoint(completions)},
        **message_routes(endpoint(messages), count_tokens),
        **tokenize.routes(),
    }


async def _admin_routes(settings: GatewaySettings, host: Host, mesh: _Mesh) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await files.wait()
        tls = MeshTLS(files)
        channels = Channels(tls)
        host.certificates.show("operator", tls.expiry)
    return AdminRoutes(mesh.view, channels, settings.request_timeout).routes()


async def _wait_whole(health: MeshHealth, seconds: float = math.inf) -> None:
    """Wait until no part is missing, or the time is over."""
    loop = asyncio.get_running_loop()
    logged, until = list[str](), loop.time() + seconds
    while (missing := health.missing()) and loop.time() < until:
        if missing != logged:
            log.info("waiting for %s", ", ".join(missing))
            logged = missing
        await asyncio.sleep(0.02)
