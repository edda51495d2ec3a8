"""Routes of models: those that describe all models of a gateway with several meshes, and those by which operators load
and unload LoRA adapters, under vLLM's names. The latter exist only with an admin key."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec

from tokenloom.request import errors
from tokenloom.request.adapter_names import check_adapter_name

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Route, Routes
from ..mesh.engine_calls import EngineCalls
from ..mesh.mesh_adapters import MeshAdapters
from ..openapi import route_table
from ..openapi.request_schemas import AdapterBody, LoadAdapter, PinAdapter
from ..serving.mesh_health import PartState
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from .admin_routes import respond_changed
from .status_routes import get, health_object, model_object, model_of, respond_health


class ModelsRoutes:
    """Answers for all models what :class:`.status_routes.StatusRoutes` answers for one."""

    def __init__(self, meshes: ServedMeshes) -> None:
        self._meshes = meshes
        self._created = int(time.time())

    def routes(self) -> Routes:
        """Return the routes that replace those of a single mesh."""
        return {
            route_table.MODELS: get(lambda: {"object": "list", "data": list(self._models().values())}),
            **{Route("GET", f"/v1/models/{name}"): get(partial(self._model, name)) for name in self._meshes.names},
            route_table.MODEL: self.adapter,
            route_table.HEALTH: self.health,
            route_table.PING: self.health,
            route_table.POST_PING: self.health,
        }

    async def health(self, exchange: HttpExchange) -> None:
        """Answer 200 while any model is answered: a balancer that stopped sending requests would end all models.

        The body has the state of each model, and of each part in all meshes together.
        """
        states = self._meshes.states()
        of_meshes = [parts for parts, _ in states.values()]
        names = dict.fromkeys(part for parts in of_meshes for part in parts)
        parts = {part: _together([parts[part] for parts in of_meshes if part in parts]) for part in names}
        fall_backs = dict.fromkeys(each for mesh in self._meshes for each in mesh.health.fall_backs())
        body = health_object(parts, self._meshes.missing(), list(fall_backs))
        models = {name: health_object(*state, fall_backs=()) for name, state in states.items()}
        await respond_health(exchange, body | {"models": models})

    def _models(self) -> dict[str, dict[str, object]]:
        """Return every model under each of its names, then the adapters."""
        limits = {mesh.model: mesh.health.limits() for mesh in self._meshes}
        models = {
            name: model_object(name, spec.names[0], limits.get(spec.names[0]), self._created)
            for spec in self._meshes.specs
            for name in spec.names
        }
        return models | {name: self._adapter(name) for name in self._meshes.listed() if name not in models}

    async def adapter(self, exchange: HttpExchange) -> None:
        """Describe the LoRA adapter of the path. Raises ``ModelNotFound``."""
        await exchange.respond(200, encode_json(self._adapter(model_of(exchange))))

    def _adapter(self, name: str) -> dict[str, object]:
        mesh, _ = self._meshes.find(name)
        return model_object(name, mesh.model, mesh.health.limits(), self._created, parent=mesh.model)

    def _model(self, name: str) -> dict[str, object]:
        return self._models()[name]


def _together(states: Sequence[PartState]) -> PartState:
    """Return the state of a part of several meshes."""
    return PartState(
        sum(state.num_serving for state in states), sum(state.num_known for state in states), states[0].is_needed
    )


MAX_BODY_BYTES = 16 << 10
MAX_PATH = 4096

T = TypeVar("T", bound=AdapterBody)


class LoraRoutes:
    """Changes the adapters of the mesh that a body names; a gateway with one mesh needs no name."""

    def __init__(self, meshes: ServedMeshes, calls: EngineCalls) -> None:
        self._meshes = meshes
        self._calls = calls
        self._adapters: dict[str, MeshAdapters] = {}  # by model

    def routes(self) -> Routes:
        return {
            route_table.LOAD_ADAPTER: self.load,
            route_table.UNLOAD_ADAPTER: self.unload,
            route_table.PIN_ADAPTER: self.pin,
            route_table.ADAPTERS: self.show,
        }

    async def load(self, exchange: HttpExchange) -> None:
        """Load an adapter on all engines or on none."""
        body = await _read(exchange, LoadAdapter)
        name = check_adapter_name(body.lora_name, "lora_name")
        if not 0 < len(body.lora_path) <= MAX_PATH or "\0" in body.lora_path:
            raise errors.InvalidArgument(f"lora_path must be a path of 1 to {MAX_PATH} characters", "lora_path")
        adapters = self._of(self._meshes.pick(body.base_model_name))
        await respond_changed(exchange, "loaded", await adapters.load(name, body.lora_path, in_place=body.load_inplace))

    async def unload(self, exchange: HttpExchange) -> None:
        body = await _read(exchange, AdapterBody)
        causes = await self._of(self._meshes.pick(body.base_model_name)).unload(body.lora_name)
        await respond_changed(exchange, "unloaded", causes)

    async def pin(self, exchange: HttpExchange) -> None:
        """``pinned``: false ends the pinning."""
        body = await _read(exchange, PinAdapter)
        adapters = self._of(self._meshes.pick(body.base_model_name))
        causes = await adapters.pin(body.lora_name, pinned=body.pinned)
        await respond_changed(exchange, "pinned" if body.pinned else "unpinned", causes)

    async def show(self, exchange: HttpExchange) -> None:
        """Answer with the adapters of all models, and what each engine has of them."""
        found = [await self._states(mesh) for mesh in self._meshes]
        await exchange.respond(200, encode_json({"adapters": [each for states in found for each in states]}))

    async def _states(self, mesh: ServedMesh) -> list[dict[str, object]]:
        known = mesh.view.adapters
        states = await self._of(mesh).states() if known else {}
        return [
            {
                "id": f"{mesh.model}:{name}",
                "lora_name": name,
                "pinned": known[name].pinned,
                "digest": known[name].digest.hex(),
                "engines": {
                    engine: {"in_slot": each.in_slot, "requests": each.requests, "rank": each.rank}
                    for engine, answer in states.items()
                    for each in answer.adapters
                    if each.adapter.digest == known[name].digest
                },
            }
            for name in sorted(known)
        ]

    def _of(self, mesh: ServedMesh) -> MeshAdapters:
        if mesh.model not in self._adapters:
            self._adapters[mesh.model] = MeshAdapters(mesh.view, self._calls)
        return self._adapters[mesh.model]


async def _read(exchange: HttpExchange, form: type[T]) -> T:
    with await exchange.read_body(MAX_BODY_BYTES) as received:
        try:
            return msgspec.json.decode(received.data, type=form)
        except msgspec.ValidationError as error:
            raise errors.InvalidArgument(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise errors.InvalidArgument("the body is not valid JSON") from None
