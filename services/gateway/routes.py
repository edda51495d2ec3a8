"""Everything that the HTTP edge answers, path by path."""

import time
from collections.abc import Mapping
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from .app import Handler
from .exchange import Exchange
from .generation import Generator
from .health import MeshHealth
from .sse import encode_json


class StatusRoutes:
    """What is not generation: models, health, version, load, metrics."""

    def __init__(self, health: MeshHealth, registry: CollectorRegistry, model: str, generator: Generator) -> None:
        self._health = health
        self._registry = registry
        self._model = model
        self._generator = generator
        self._created = int(time.time())

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        return {
            "/v1/models": {"GET": self.models},
            f"/v1/models/{self._model}": {"GET": self.model},
            "/health": {"GET": self.health},
            "/ping": {"GET": self.health, "POST": self.health},
            "/version": {"GET": self.version},
            "/load": {"GET": self.load},
            "/metrics": {"GET": self.metrics},
        }

    async def models(self, exchange: Exchange) -> None:
        await exchange.respond(200, encode_json({"object": "list", "data": [self._model_object()]}))

    async def model(self, exchange: Exchange) -> None:
        await exchange.respond(200, encode_json(self._model_object()))

    async def health(self, exchange: Exchange) -> None:
        """200 when a request would be answered, else 503 and what is missing."""
        missing = self._health.missing()
        if missing:
            body = encode_json({"status": "unavailable", "missing": missing})
            await exchange.respond(503, body, headers=[(b"retry-after", b"1")])
        else:
            await exchange.respond(200, encode_json({"status": "ok"}))

    async def version(self, exchange: Exchange) -> None:
        await exchange.respond(200, encode_json({"version": version("tokenloom")}))

    async def load(self, exchange: Exchange) -> None:
        """Outputs in work at this gateway, as vLLM counts requests under ``server_load``."""
        await exchange.respond(200, encode_json({"server_load": self._generator.num_live}))

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.respond(200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())

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
