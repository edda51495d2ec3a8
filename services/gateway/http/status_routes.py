"""Routes that describe the gateway and its mesh: models, health, version, load, engines and metrics."""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry

from tokenloom.services.runtime.telemetry.metrics_page import metrics_page
from tokenloom.v1 import coordinator_pb2, types_pb2

from ..generation.generator import Generator
from ..health import MeshHealth
from ..mesh.mesh_view import MeshView
from .app import Handler, Routes
from .exchange import Exchange
from .sse import encode_json


class StatusRoutes:
    """Answers what needs no generation."""

    def __init__(
        self, health: MeshHealth, mesh: MeshView, generator: Generator, registry: CollectorRegistry, model: str
    ) -> None:
        self._health = health
        self._mesh = mesh
        self._generator = generator
        self._registry = registry
        self._model = model
        self._created = int(time.time())

    def routes(self) -> Routes:
        return {
            "/v1/models": get(lambda: {"object": "list", "data": [self._model_object()]}),
            f"/v1/models/{self._model}": get(self._model_object),
            "/": {"GET": self.root},  # clients ask for HEAD / to learn whether a server is there
            "/health": {"GET": self.health},
            "/ping": {"GET": self.health, "POST": self.health},
            "/version": get(lambda: {"version": version("tokenloom")}),
            # Under vLLM's name: how many outputs clients wait for at this gateway.
            "/load": get(lambda: {"server_load": self._generator.num_live}),
            "/server_info": get(self._server_info),
            # What routers ask SGLang's servers for.
            "/model_info": get(
                lambda: {"model_path": self._model, "tokenizer_path": self._model, "is_generation": True}
            ),
            "/metrics": {"GET": self.metrics},
        }

    async def health(self, exchange: Exchange) -> None:
        """Answer 200 when a request would be answered, otherwise 503; the body names each part's state."""
        parts, missing = self._health.parts(), self._health.missing()
        degraded = [name for name, part in parts.items() if part.state != "ok" and name not in missing]
        body: dict[str, object] = {"status": "unavailable" if missing else "degraded" if degraded else "ok"}
        if missing:
            body["missing"] = missing
        if degraded:
            body["degraded"] = degraded
        body["parts"] = {
            name: {"state": part.state, "serving": part.num_serving, "known": part.num_known}
            for name, part in parts.items()
        }
        if missing:
            await exchange.respond(503, encode_json(body), headers=[(b"retry-after", b"1")])
        else:
            await exchange.respond(200, encode_json(body))

    async def root(self, exchange: Exchange) -> None:
        text = f"Tokenloom serves {self._model}. /docs describes the API.\n"
        await exchange.respond(200, text.encode(), b"text/plain; charset=utf-8")

    async def metrics(self, exchange: Exchange) -> None:
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
            "engines": [_engine_object(entry) for entry in self._mesh.engines],
        }

    def _model_object(self) -> dict[str, object]:
        limits = self._health.limits()
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenloom",
            "root": self._model,
            "parent": None,
            "max_model_len": limits.max_model_len if limits else None,
        }


def get(describe: Callable[[], object]) -> Mapping[str, Handler]:
    """Return the methods of a path that answers GET with what ``describe`` returns."""

    async def handler(exchange: Exchange) -> None:
        await exchange.respond(200, encode_json(describe()))

    return {"GET": handler}


def _engine_object(entry: coordinator_pb2.EngineEntry) -> dict[str, object]:
    """Describe an engine as the coordinator last reported it, without its address."""
    report = entry.report
    return {
        "engine_id": entry.identity.engine_id,
        "role": types_pb2.EngineRole.Name(report.role).removeprefix("ENGINE_ROLE_").lower(),
        "state": coordinator_pb2.EngineState.Name(report.state).removeprefix("ENGINE_STATE_").lower(),
        "running": report.running,
        "waiting": report.waiting,
        "kv_cache_usage": round(report.kv_usage, 6),
        "num_kv_blocks": entry.identity.num_kv_blocks,
    }
