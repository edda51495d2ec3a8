"""Lists the routes of Ollama's API, embeddings apart."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from ..endpoints.generation_endpoint import GenerationApi, GenerationEndpoint
from ..http.route import Routes
from ..ollama.ollama import OllamaApi
from ..openai.chat import ChatApi
from ..openapi import route_table
from ..serving.mesh_health import MeshHealth
from .status_routes import OLLAMA_DETAILS as DETAILS
from .status_routes import get

_LINES = ((b"content-type", b"application/x-ndjson"),)


def ollama_routes(
    chats: ChatApi, endpoint: Callable[[GenerationApi], GenerationEndpoint], health: MeshHealth
) -> Routes:
    """``health``: knows the limits of the model, once an engine serves it."""
    plans = chats.plans
    capabilities = ["completion", *(["tools"] if plans.tools else []), *(["thinking"] if plans.reasoning else [])]

    def show() -> object:
        length = limits.max_model_len if (limits := health.limits()) else None
        info = {"general.architecture": "tokenloom", "tokenloom.context_length": length}
        return {"details": DETAILS, "model_info": info, "capabilities": capabilities}

    both = {kind: replace(endpoint(OllamaApi(chats, kind)), stream_headers=_LINES) for kind in (True, False)}
    return {
        route_table.OLLAMA_CHAT: both[True],
        route_table.OLLAMA_GENERATE: both[False],
        route_table.OLLAMA_SHOW: get(show),
        route_table.OLLAMA_VERSION: get(lambda: {"version": version("tokenloom")}),
    }
