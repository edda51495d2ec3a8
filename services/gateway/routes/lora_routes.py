"""Routes for operators that load and unload LoRA adapters, under vLLM's names. They exist only with an admin key."""

from typing import TypeVar

import msgspec

from tokenloom.request import errors
from tokenloom.request.adapter_names import check_adapter_name

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange
from ..http.route import Routes
from ..mesh.engine_calls import EngineCalls
from ..mesh.mesh_adapters import MeshAdapters
from ..openapi import route_table
from ..openapi.lora_schemas import AdapterBody, LoadAdapter, PinAdapter
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from .admin_routes import respond_changed

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
