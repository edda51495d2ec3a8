"""The API of a gateway over output processors that are stand-ins: everything between the two is the product's."""

import asyncio
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry

from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.gateway.assistant.message_plans import MessagePlans
from tokenloom.services.gateway.generation.admission import RequestAdmission, WaitEstimator
from tokenloom.services.gateway.generation.generator import Generator
from tokenloom.services.gateway.generation.preparation import MeshLinks, RequestContext
from tokenloom.services.gateway.generation.resumable import ResumableRequests, UnattendedMetrics
from tokenloom.services.gateway.http.request_body import BodyParser
from tokenloom.services.gateway.mesh.mesh_view import MeshLoad
from tokenloom.services.gateway.mesh.output_pool import OutputPool
from tokenloom.services.gateway.metrics.gateway_metrics import GatewayMetrics
from tokenloom.services.gateway.metrics.usage_counts import AdapterUsage, KeyUsage
from tokenloom.services.gateway.openai.body_reader import BodyReader
from tokenloom.services.gateway.records.model_names import ModelNames
from tokenloom.services.gateway.responses import response_store
from tokenloom.services.gateway.responses.response_store import ResponseStore
from tokenloom.services.gateway.routes.api_routes import api_routes
from tokenloom.services.gateway.serving.served_mesh import ServedMesh
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.tenants.tenant import TenantLimits
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1 import tokenizer_pb2, types_pb2

from .clients import TENANTS, Clients, two_tenants
from .processors import FINGERPRINT, Processors
from .world import World

SETTINGS = GatewaySettings.of(
    tokenizers=("unix:/none",), output_processors=("unix:/none",), coordinator="unix:/none", page=False
)
LIMITS = types_pb2.ModelLimits(max_model_len=512, vocab_size=256)
MAX_RUNNING = 4
"""Responses that may run in the background: as many as a test can begin."""
MAX_KEPT_BYTES = 4096
KEEP_DISCONNECTED = 2.0
"""Seconds that a request may run whose client has left."""
TIMEOUT = 20.0
ENDED_SECONDS = 6.0
"""After so long, what runs without a client has ended by itself."""
_PARSER = BodyParser((), ())


class _Tokenizers:
    """A byte is a token; an answer takes a few turns of the loop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.info = tokenizer_pb2.GetTokenizerInfoResponse(
            fingerprint=FINGERPRINT, vocab_size=256, has_chat_template=True, max_token_bytes=1
        )

    async def encode(self, texts: Sequence[str], **_: Any) -> tokenizer_pb2.EncodeResponse:
        await self._world.step(3)
        prompts = [tokenizer_pb2.TokenizedPrompt(token_ids=text.encode()) for text in texts]
        return tokenizer_pb2.EncodeResponse(prompts=prompts)

    async def encode_chat(self, chat: Any, **_: Any) -> tokenizer_pb2.EncodeChatResponse:
        await self._world.step(3)
        prompt = tokenizer_pb2.TokenizedPrompt(token_ids=chat.messages_json[:16])
        return tokenizer_pb2.EncodeChatResponse(prompt=prompt)


class _View:
    """Knows an engine without load."""

    adapters: dict[str, Any] = {}
    block_size = 0
    limits = LIMITS

    def load(self) -> MeshLoad:
        return MeshLoad(0, 0, 0.0)


class Gateway:
    """Holds one gateway.

    Attributes:
        processors: Behind it.
        asked: The most tokens of requests, by tenant and by what distinguishes requests.
        answered: The tokens of whole answers that clients have.
        clients: In front of it.
    """

    def __init__(self, world: World, limits: TenantLimits | None = None, addresses: Sequence[str] = ("op",)) -> None:
        self.world = world
        self.answered: dict[str, dict[object, int]] = {name: {} for name in TENANTS}
        self.asked: dict[str, dict[object, int]] = {name: {} for name in TENANTS}
        self.clients: Clients = two_tenants(world, limits)
        self.processors = Processors(world)
        for address in addresses:
            self.processors.add(address)
        self.tasks = Tasks(lambda error: world.violated(f"a task failed: {error!r}"))
        self.fall_backs = FallBacks()
        registry, random = CollectorRegistry(), Random(0)
        tokenizers: Any = _Tokenizers(world)
        view: Any = _View()
        self.estimator = WaitEstimator(60.0, random)
        self.admission = RequestAdmission(self.clients.shares, self.estimator)
        self.outputs = OutputPool(
            PeerMembers(addresses),
            "gateway",
            1,
            self.processors,  # type: ignore[arg-type]
            max_kept_bytes=MAX_KEPT_BYTES,
            on_moved=lambda: None,
        )
        metrics = GatewayMetrics(registry, "model", KeyUsage(registry), AdapterUsage(registry))
        unattended = UnattendedMetrics(registry)
        self.resumable = ResumableRequests(KEEP_DISCONNECTED, unattended, lambda error: world.violated(repr(error)))
        context = RequestContext(
            model="model", default_timeout=TIMEOUT, random=random, clock=lambda: round(world.loop.time() * 1e9)
        )
        self.generator = Generator(
            MeshLinks(tokenizers, view, self.outputs), context, metrics, self.admission, self.resumable
        )
        names, plans = ModelNames(("model",), view), MessagePlans.choose("", "", tokenizers.info)
        health: Any = SimpleNamespace(missing=lambda: (), limits=lambda: LIMITS)
        self.mesh = ServedMesh(names, plans, self.generator, tokenizers, self.outputs, view, health, metrics)
        with patch.object(response_store, "MAX_RUNNING", MAX_RUNNING):
            self.responses = ResponseStore(1 << 20)
        reader, host = BodyReader(strict=False), self.host
        routes = api_routes(SETTINGS, host, self.mesh, _PARSER, reader, self.responses)
        self.app = self.clients.application(routes)
        world.loop.on_idle = self.check_held

    @property
    def host(self) -> Any:
        """Stands for what owns the gateway's tasks."""
        return SimpleNamespace(spawn=self.tasks.spawn, fall_backs=self.fall_backs)

    async def start(self) -> None:
        """Connect to the output processors."""
        self.outputs.start(self.host, FINGERPRINT)
        await self.world.loop.idle()

    def send(self, method: str, path: str, body: Any = None, **options: Any) -> "asyncio.Task[Any]":
        """Begin a request that the plan may cancel."""
        return self.clients.send(self.app, method, path, body, **options)

    def check_held(self) -> None:
        """Check that whatever is computed for a tenant is held by a place of its. Called when all messages have been
        delivered."""
        for tenant, number in self.processors.live_outputs().items():
            held = next((share.live_outputs for share in self.clients.shares if share.name == tenant), 0)
            text = "more outputs of a tenant are computed than it has places"
            self.world.check(number <= held, text)

    async def check(self) -> None:
        """Check at the end that nothing is held, that nothing waits, and that each token was charged once."""
        world = self.world
        await asyncio.sleep(ENDED_SECONDS)
        self.clients.check_all_given_back()
        estimator = self.estimator
        waiting = (estimator.live, estimator.pending, estimator.pending_tokens)
        world.check(waiting == (0, 0, 0), f"the estimator still counts {waiting}")
        pool = self.outputs
        for name in ("_waiting", "_sought", "_held"):
            world.check(not getattr(pool, name), f"a request that has ended is still in OutputPool.{name}")
        world.check(not pool._kept.taken, "bytes of kept prompts were not given back")
        live = sum(run.is_live for run in self.processors.runs)
        world.check(not live, "a request is still computed, for no client")
        for share in self.clients.shares:
            runs = [run for run in self.processors.runs if run.submit.tenant == share.name]
            computed = sum(run.num_computed for run in runs)
            answered = sum(self.answered[share.name].values())
            if self.processors.was_cut:  # the prompt of a request counts that waited for an output processor only
                computed = sum(self.asked[share.name].values())
            world.check(share.tokens <= computed, "more tokens were charged than computed")
            world.check(share.tokens >= answered, "fewer tokens were charged than clients have")
        places, num_bytes = self.responses._places.taken, self.responses._running_bytes.taken
        world.check((places, num_bytes) == (0, 0), f"{places} places and {num_bytes} bytes of responses stay taken")
        await self.resumable.close()
        await self.tasks.close()
