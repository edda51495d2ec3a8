"""Routes that describe all models of a gateway with several meshes."""

import time
from collections.abc import Sequence
from functools import partial

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Route, Routes
from ..openapi import route_table
from ..serving.mesh_health import PartState
from ..serving.served_meshes import ServedMeshes
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
