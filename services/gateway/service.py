"""The gateway as a service: joins its parts to one road and serves it over HTTP and gRPC."""

import asyncio
import logging

from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.members import Members
from tokenloom.v1 import tokenizer_pb2

from .assistant.message_plans import MessagePlans
from .gateway_settings import GatewaySettings
from .generation.generation import Generator
from .generation.served import Served
from .health import MeshHealth
from .http.http_server import HttpServer
from .mesh.mesh_view import MeshView
from .mesh.output_pool import OutputPool
from .mesh.tokenizer_client import TokenizerClient
from .metrics import EngineGauges, GatewayMetrics, HealthGauges
from .public_edges import open_edges

log = logging.getLogger(__name__)


class GatewayService:
    """Fulfils :class:`tokenloom.services.runtime.host.service.Service`.

    Attributes:
        http_address: Where HTTP is served, once started.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._served: Served | None = None
        self._http: HttpServer | None = None
        self.http_address = ""

    async def start(self, host: Host) -> None:
        """Ready when a request would be answered: until then this waits, and HTTP says what is missing."""
        settings = self._settings
        served = self._served = await self._connect(host)
        app = await open_edges(settings, host, served)
        self._http = HttpServer(
            app,
            settings.http_listen,
            insecure=settings.is_open,
            tls_cert=settings.public_tls_cert,
            tls_key=settings.public_tls_key,
        )
        self.http_address = self._http.address
        host.spawn(self._http.serve(), name="http server")
        host.publish(http=self.http_address, model=served.model)
        await _wait_whole(served.health)
        scheme = "http" if settings.public_tls_cert is None else "https"
        log.info("serving %s on %s://%s", served.model, scheme, self.http_address)

    async def drain(self) -> None:
        assert self._served is not None
        assert self._http is not None
        self._served.health.draining = True
        await self._served.generator.drain()
        await self._http.drain()

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.stop()
            self._http = None

    async def _connect(self, host: Host) -> Served:
        """Turns to the other parts; returns once a tokenizer has told what is served."""
        settings = self._settings
        tokenizers = TokenizerClient(Members(settings.tokenizers), host.channels)
        mesh = MeshView(settings.coordinator, host.channels)
        outputs = OutputPool(Members(settings.output_processors), settings.instance_id, host.epoch, host.channels)
        health = MeshHealth(tokenizers, outputs, mesh)
        host.spawn(tokenizers.run(), name="tokenizer probes")
        host.spawn(mesh.run(), name="coordinator watch")
        info = await tokenizers.wait_known()
        outputs.start(host, info.fingerprint)
        model = settings.served_model_name or info.fingerprint.model
        host.metrics.register(EngineGauges(mesh, model))
        host.metrics.register(HealthGauges(health))
        generator = Generator(
            tokenizers,
            mesh,
            outputs,
            GatewayMetrics(host.metrics, model),
            max_live=settings.max_live_requests,
            default_timeout=settings.request_timeout,
            most_urgent_priority=settings.most_urgent_priority,
            tracer=host.tracer,
            model=model,
        )
        return Served(model, self._plans(info), generator, tokenizers, mesh, health)

    def _plans(self, info: tokenizer_pb2.GetTokenizerInfoResponse) -> MessagePlans:
        settings = self._settings
        return MessagePlans.choose(
            settings.tool_call_parser,
            settings.reasoning_parser,
            told_tools=info.tool_call_parser,
            told_reasoning=info.reasoning_parser,
        )


async def _wait_whole(health: MeshHealth) -> None:
    said: list[str] = []
    while missing := health.missing():
        if missing != said:
            log.info("waiting for %s", ", ".join(missing))
            said = missing
        await asyncio.sleep(0.02)
