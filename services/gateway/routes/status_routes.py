"""Routes that describe the gateway and its mesh: models, health, version, load, engines and metrics."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version

from prometheus_client import CollectorRegistry

from tokenloom.process.fall_backs import KINDS, FallBack
from tokenloom.services.runtime.telemetry.metrics_server import metrics_page
from tokenloom.v1 import coordinator_pb2, types_pb2

from ..encoding.sse import encode_json
from ..generation.generator import Generator
from ..http.http_exchange import HttpExchange
from ..http.route import Handler, Route, Routes
from ..mesh.mesh_view import MeshView, engine_words
from ..openapi import route_table
from ..records.model_names import ModelNames
from ..serving.mesh_health import MeshHealth, PartState


class StatusRoutes:
    """Answers what needs no generation."""

    def __init__(
        self,
        health: MeshHealth,
        mesh: MeshView,
        generator: Generator,
        registry: CollectorRegistry,
        models: ModelNames,
        plugins: Sequence[str] = (),
    ) -> None:
        """``models``: the names of the model and of its adapters. ``plugins``: the packages whose plugins this gateway
        may load, as people read them."""
        self._plugins = list(plugins)
        self._health = health
        self._mesh = mesh
        self._generator = generator
        self._registry = registry
        self._models = models
        self._names = models.own
        self._model = models.own[0]
        self._created = int(time.time())

    def routes(self) -> Routes:
        return {
            route_table.MODELS: get(lambda: {"object": "list", "data": list(map(self._model_object, self._listed()))}),
            **{Route("GET", f"/v1/models/{name}"): get(partial(self._model_object, name)) for name in self._names},
            route_table.MODEL: self.adapter,
            route_table.ROOT: self.root,
            route_table.HEALTH: self.health,
            route_table.PING: self.health,
            route_table.POST_PING: self.health,
            route_table.VERSION: get(lambda: {"version": version("tokenloom")}),
            # Under vLLM's name: how many outputs clients wait for at this gateway.
            route_table.LOAD: get(lambda: {"server_load": self._generator.num_live}),
            route_table.SERVER_INFO: get(self._server_info),
            # What routers ask SGLang's servers for.
            route_table.MODEL_INFO: get(
                lambda: {"model_path": self._model, "tokenizer_path": self._model, "is_generation": True}
            ),
            route_table.METRICS: self.metrics,
        }

    async def health(self, exchange: HttpExchange) -> None:
        """Answer 200 when a request would be answered, otherwise 503; the body names each part's state."""
        health = self._health
        await respond_health(exchange, health_object(health.parts(), health.missing(), health.fall_backs()))

    async def root(self, exchange: HttpExchange) -> None:
        text = f"Tokenloom serves {self._model}. /docs describes the API.\n"
        await exchange.respond(200, text.encode(), b"text/plain; charset=utf-8")

    async def adapter(self, exchange: HttpExchange) -> None:
        """Describe the LoRA adapter of the path. Raises ``ModelNotFound``."""
        name = model_of(exchange)
        self._models.find(name)
        await exchange.respond(200, encode_json(self._model_object(name)))

    async def metrics(self, exchange: HttpExchange) -> None:
        page, content_type = metrics_page(self._registry, exchange.headers.get(b"accept", b"").decode("latin-1"))
        await exchange.respond(200, page, content_type.encode())

    def _server_info(self) -> dict[str, object]:
        limits = self._health.limits()
        return {
            "version": version("tokenloom"),
            "model": self._model,
            "max_model_len": limits.max_model_len if limits else None,
            "vocab_size": limits.vocab_size if limits else None,
            "server_load": self._generator.num_live,
            "plugins": self._plugins,
            "engines": [_engine_object(entry) for entry in self._mesh.engines],
        }

    def _listed(self) -> Iterable[str]:
        yield from self._names
        yield from (name for name in self._models.adapters() if name not in self._names)

    def _model_object(self, name: str) -> dict[str, object]:
        parent = None if name in self._names else self._model
        return model_object(name, self._model, self._health.limits(), self._created, parent=parent)


def model_of(exchange: HttpExchange) -> str:
    """Return the model that a path under ``/v1/models/`` names; names may contain slashes."""
    return exchange.path.split("/", 3)[3]


def model_object(
    name: str, root: str, limits: types_pb2.ModelLimits | None, created: int, *, parent: str | None = None
) -> dict[str, object]:
    """Describe a model as OpenAI's and vLLM's servers do. ``root``: its first name; ``parent``: of an adapter."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tokenloom",
        "root": root,
        "parent": parent,
        "max_model_len": limits.max_model_len if limits else None,
    }


def health_object(
    parts: Mapping[str, PartState], missing: Sequence[str], fall_backs: Sequence[FallBack]
) -> dict[str, object]:
    """Describe the state of a mesh, without what only operators may know, because any client may ask for it: subjects
    and details of fall-backs name addresses and files. ``missing``: the parts without which it does not answer."""
    degraded = [name for name, part in parts.items() if part.state != "ok" and name not in missing]
    body: dict[str, object] = {"status": "unavailable" if missing else "degraded" if degraded or fall_backs else "ok"}
    if missing:
        body["missing"] = missing
    if degraded:
        body["degraded"] = degraded
    if fall_backs:
        kinds = sorted({each.kind for each in fall_backs})
        body["fall_backs"] = [{"kind": kind, "meaning": KINDS.get(kind, "")} for kind in kinds]
    body["parts"] = {
        name: {"state": part.state, "serving": part.num_serving, "known": part.num_known}
        for name, part in parts.items()
    }
    return body


async def respond_health(exchange: HttpExchange, body: Mapping[str, object]) -> None:
    """Send a state with the status that probes read."""
    if body["status"] == "unavailable":
        await exchange.respond(503, encode_json(body), headers=[(b"retry-after", b"1")])
    else:
        await exchange.respond(200, encode_json(body))


def get(describe: Callable[[], object]) -> Handler:
    """Return a handler that answers with what ``describe`` returns, as JSON."""

    async def handler(exchange: HttpExchange) -> None:
        await exchange.respond(200, encode_json(describe()))

    return handler


def _engine_object(entry: coordinator_pb2.EngineEntry) -> dict[str, object]:
    """Describe an engine as the coordinator last reported it, without its address."""
    report = entry.report
    return {
        "engine_id": entry.identity.engine_id,
        **engine_words(entry),
        "running": report.running,
        "waiting": report.waiting,
        "kv_cache_usage": round(report.kv_usage, 6),
        "num_kv_blocks": entry.identity.num_kv_blocks,
        "plugins": list(entry.identity.plugins),
    }
