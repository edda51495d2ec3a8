"""Lists the routes of Ollama's API, embeddings apart."""

from collections.abc import Callable
from dataclasses import replace

from ..endpoints.generation_endpoint import GenerationApi, GenerationEndpoint
from ..http.request_body import BodyParser
from ..http.route import Handler, Route, Routes
from ..ollama.ollama import OllamaApi, OllamaEndpoint, OllamaModelCalls
from ..ollama.ollama_models import VERSION, OllamaModels
from ..openai.chat import ChatApi
from ..openai.completions import CompletionsApi
from ..openapi import route_table
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from .status_routes import get

_LINES = ((b"content-type", b"application/x-ndjson"),)


def ollama_routes(
    mesh: ServedMesh,
    chats: ChatApi,
    endpoint: Callable[[GenerationApi], GenerationEndpoint],
    parser: BodyParser,
    max_body_bytes: int,
    began: str,
) -> Routes:
    """Return the routes that name a model in their body. ``began``: when the gateway started."""
    calls = OllamaModelCalls(mesh, chats.plans, parser, max_body_bytes, began)

    def generating(*, is_chat: bool) -> Handler:
        api = OllamaApi(chats, CompletionsApi(chats.reader), is_chat=is_chat)
        return OllamaEndpoint(replace(endpoint(api), stream_headers=_LINES), api)

    return {
        route_table.OLLAMA_CHAT: generating(is_chat=True),
        route_table.OLLAMA_GENERATE: generating(is_chat=False),
        route_table.OLLAMA_SHOW: calls.show,
        route_table.OLLAMA_PULL: calls.pull,
        **dict.fromkeys(route_table.OLLAMA_MANAGEMENT, calls.refuse),
    }


def ollama_status_routes(meshes: ServedMeshes, began: str) -> Routes:
    """Return the routes that describe all models."""
    models = OllamaModels(meshes, began)
    routes: dict[Route, Handler] = {
        route_table.OLLAMA_TAGS: get(models.listed),
        route_table.OLLAMA_PS: get(models.running),
        route_table.OLLAMA_VERSION: get(lambda: {"version": VERSION}),
    }
    return routes
