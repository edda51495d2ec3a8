"""Lists the routes of the HTTP API, except those for operators."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache

from tokenloom.services.runtime.host.host import Host

from ..anthropic.count_tokens import CountTokens
from ..anthropic.error_body import ANTHROPIC
from ..anthropic.messages import MessagesApi
from ..endpoints.generation_endpoint import GenerationApi, GenerationEndpoint
from ..endpoints.silent_streams import SilentStreams
from ..http.error_form import RESPONSES, ErrorForm
from ..http.json_body import BodyParser
from ..http.response_counts import ResponseCounts
from ..http.route import Route, Routes
from ..http.turn_share import ANSWERS_PER_TURN, TurnShare
from ..ollama.ollama import OLLAMA
from ..openai.body_reader import BodyReader
from ..openai.chat import ChatApi
from ..openai.completions import CompletionsApi
from ..openapi import route_table
from ..page.page_routes import page_routes
from ..responses.response_store import ResponseStore
from ..responses.responses import ResponsesApi
from ..responses.responses_endpoint import ResponsesEndpoint
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from ..settings.gateway_settings import GatewaySettings
from .ollama_routes import ollama_routes, ollama_status_routes
from .openapi_routes import document_routes
from .pooling_routes import pooling_routes
from .status_routes import StatusRoutes
from .tokenize_routes import TokenizeRoutes

ERROR_FORMS: Mapping[Route, ErrorForm] = {
    route_table.MESSAGES: ANTHROPIC,
    route_table.COUNT_TOKENS: ANTHROPIC,
    route_table.RESPONSES: RESPONSES,
    **{route: OLLAMA for route in route_table.ROUTES if route.path.startswith("/api/")},
}
"""How the routes report errors that do not do it in OpenAI's form."""


@cache
def started_at() -> str:
    """Return when this process first made its routes, as RFC 3339 writes it."""
    return datetime.now(UTC).isoformat()


def status_routes(settings: GatewaySettings, host: Host, meshes: ServedMeshes, counts: ResponseCounts) -> Routes:
    """Return the routes that describe the gateway and, of several meshes, the first one."""
    mesh = meshes.first
    status = StatusRoutes(mesh.health, mesh.view, mesh.generator, host.metrics, mesh.models)
    return {
        **status.routes(),
        **(page_routes(meshes, host, counts, status.root) if settings.page else {}),
        **ollama_status_routes(meshes, started_at()),
        **document_routes(mesh.health.limits, admin=settings.has_admin, batches=settings.batch_dir is not None),
    }


def api_routes(
    settings: GatewaySettings,
    host: Host,
    mesh: ServedMesh,
    parser: BodyParser,
    reader: BodyReader,
    store: ResponseStore,
) -> Routes:
    """Return the routes whose requests name a model. ``store``: keeps the responses of all models."""
    limit, timeout, answers = settings.max_body_bytes, settings.request_timeout, TurnShare(ANSWERS_PER_TURN)
    silent = SilentStreams(settings.stream_head_after)
    chats = ChatApi(reader, mesh.plans)
    messages = MessagesApi(reader, chats)
    tokenize = TokenizeRoutes(parser, reader, mesh.tokenizers, mesh.health, mesh.models, limit, timeout)
    count_tokens = CountTokens(parser, reader, mesh.tokenizers, mesh.models, limit, timeout)
    responses = ResponsesApi(reader, chats, mesh.models, store)

    def endpoint(api: GenerationApi) -> GenerationEndpoint:
        return GenerationEndpoint(api, mesh.generator, mesh.models, parser, limit, answers, silent)

    stored = ResponsesEndpoint(endpoint(responses), responses, mesh.generator, store, host)
    return {
        route_table.CHAT: endpoint(chats),
        route_table.COMPLETIONS: endpoint(CompletionsApi(reader)),
        route_table.MESSAGES: endpoint(messages),
        route_table.COUNT_TOKENS: count_tokens,
        **ollama_routes(mesh, chats, endpoint, parser, limit, started_at()),
        route_table.RESPONSES: stored,
        route_table.RESPONSE: stored.retrieve,
        route_table.DELETE_RESPONSE: stored.delete,
        route_table.CANCEL_RESPONSE: stored.cancel,
        **tokenize.routes(),
        **pooling_routes(mesh, parser, reader, limit),
    }
