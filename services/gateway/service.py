"""The gateway as a service: joins its parts to one road and serves it over HTTP and gRPC."""

import asyncio
import logging

from tokenloom.v1 import inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2_grpc

from ..runtime.channels import Channels
from ..runtime.host import Host
from ..runtime.members import Members
from ..runtime.tls import MeshTLS
from .admin_routes import AdminRoutes
from .app import App, Routes
from .auth import ApiKeys
from .chat import ChatApi
from .completions import CompletionsApi
from .cors import Cors
from .endpoint import Endpoint
from .engine_admins import EngineAdmins
from .generation import Generator
from .health import MeshHealth
from .http_server import HttpServer
from .inference_servicer import InferenceServicer
from .kserve.servicer import KServeServicer
from .mesh_view import MeshView
from .message_plans import MessagePlans
from .metrics import EngineGauges, GatewayMetrics, HealthGauges
from .openai_models import BodyReader
from .openapi.routes import document_routes
from .output_pool import OutputPool
from .routes import StatusRoutes
from .settings import GatewaySettings
from .tokenize_routes import TokenizeRoutes
from .tokenizer_client import TokenizerClient

log = logging.getLogger(__name__)


class GatewayService:
    """Fulfils :class:`tokenloom.services.runtime.service.Service`.

    Attributes:
        http_address: Where HTTP is served, once started.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._http: HttpServer | None = None
        self._generator: Generator | None = None
        self._health: MeshHealth | None = None
        self.http_address = ""

    async def start(self, host: Host) -> None:
        """Ready when a request would be answered: until then this waits, and HTTP says what is missing."""
        settings = self._settings
        keys = ApiKeys.load(settings.api_key, settings.api_key_file)
        tokenizers = TokenizerClient(Members(settings.tokenizers), host.channels)
        mesh = MeshView(settings.coordinator, host.channels)
        outputs = OutputPool(Members(settings.output_processors), settings.instance_id, host.epoch, host.channels)
        self._health = health = MeshHealth(tokenizers, outputs, mesh)
        host.spawn(tokenizers.run(), name="tokenizer probes")
        host.spawn(mesh.run(), name="coordinator watch")
        info = await tokenizers.wait_known()
        outputs.start(host, info.fingerprint)

        model = settings.served_model_name or info.fingerprint.model
        metrics = GatewayMetrics(host.metrics, model)
        host.metrics.register(EngineGauges(mesh, model))
        host.metrics.register(HealthGauges(health))
        self._generator = generator = Generator(
            tokenizers,
            mesh,
            outputs,
            metrics,
            max_live=settings.max_live_requests,
            default_timeout=settings.request_timeout,
            most_urgent_priority=settings.most_urgent_priority,
            tracer=host.tracer,
            model=model,
        )
        host.authorize_calls(keys.authorize_call)
        plans = self._plans(tokenizers)
        inference = InferenceServicer(generator, health, model, plans, settings.request_timeout)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, host.server)
        completions = CompletionsApi(BodyReader(strict=settings.strict), model)
        kserve = KServeServicer(completions, generator, health, model)
        grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve, host.server)
        status = StatusRoutes(health, mesh, generator, host.metrics, model)
        app = App(
            {
                **status.routes(),
                **document_routes(health, admin=settings.has_admin),
                **self._endpoints(generator, tokenizers, model, plans),
            },
            keys,
            await self._admin_routes(mesh, host),
            ApiKeys.load(settings.admin_api_key, settings.admin_api_key_file),
            Cors(settings.cors_origins) if settings.cors_origins else None,
        )
        self._http = HttpServer(
            app,
            settings.http_listen,
            insecure=settings.is_open,
            tls_cert=settings.public_tls_cert,
            tls_key=settings.public_tls_key,
        )
        self.http_address = self._http.address
        host.spawn(self._http.serve(), name="http server")
        host.publish(http=self.http_address, model=model)
        await self._wait_whole(health)
        scheme = "http" if settings.public_tls_cert is None else "https"
        log.info("serving %s on %s://%s", model, scheme, self.http_address)

    async def drain(self) -> None:
        assert self._health is not None
        assert self._generator is not None
        assert self._http is not None
        self._health.draining = True
        await self._generator.drain()
        await self._http.drain()

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()
            self._http = None

    def _endpoints(self, generator: Generator, tokenizers: TokenizerClient, model: str, plans: MessagePlans) -> Routes:
        reader = BodyReader(strict=self._settings.strict)
        limit = self._settings.max_body_bytes
        chat = Endpoint(ChatApi(reader, model, plans), generator, model, max_body_bytes=limit)
        completions = Endpoint(CompletionsApi(reader, model), generator, model, max_body_bytes=limit)
        assert self._health is not None
        tokenize = TokenizeRoutes(
            reader, tokenizers, self._health, model, max_body_bytes=limit, timeout=self._settings.request_timeout
        )
        return {"/v1/chat/completions": {"POST": chat}, "/v1/completions": {"POST": completions}, **tokenize.routes()}

    async def _admin_routes(self, mesh: MeshView, host: Host) -> Routes:
        settings = self._settings
        if not settings.has_admin:
            return {}
        channels = host.channels
        if (files := settings.operator_certificate) is not None:
            await files.wait()
            channels = Channels(MeshTLS(files))
        return AdminRoutes(EngineAdmins(mesh, channels), timeout=settings.request_timeout).routes()

    def _plans(self, tokenizers: TokenizerClient) -> MessagePlans:
        settings, info = self._settings, tokenizers.info
        assert info is not None
        return MessagePlans.choose(
            settings.tool_call_parser,
            settings.reasoning_parser,
            told_tools=info.tool_call_parser,
            told_reasoning=info.reasoning_parser,
        )

    async def _wait_whole(self, health: MeshHealth) -> None:
        said: list[str] = []
        while missing := health.missing():
            if missing != said:
                log.info("waiting for %s", ", ".join(missing))
                said = missing
            await asyncio.sleep(0.02)
