"""Lists the routes of the HTTP API, except those for operators, and the fields that they read of bodies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import msgspec

from tokenloom.process.plugins import described
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import types_pb2

from ..anthropic.messages import ANTHROPIC, CountTokens, MessagesApi
from ..encoding.sse import encode_json
from ..endpoints.generation_endpoint import GenerationApi, GenerationEndpoint, SilentStreams
from ..http.client_flow import ANSWERS_PER_TURN, TurnShare
from ..http.http_exchange import RESPONSES, ErrorForm, HttpExchange
from ..http.request_body import BodyParser
from ..http.response_counts import ResponseCounts
from ..http.route import Handler, Route, Routes
from ..ollama.ollama import OLLAMA, OllamaApi, OllamaEmbedApi, OllamaEndpoint, OllamaModelCalls
from ..ollama.ollama_models import VERSION, OllamaModels
from ..openai.body_reader import NOT_SUPPORTED_YET, RENAMED, SAMPLING_FIELDS, BodyReader
from ..openai.chat import ChatApi
from ..openai.completions import CompletionsApi
from ..openapi import route_table
from ..openapi.document import document
from ..openapi.ollama_schemas import OllamaEmbedRequest, OllamaModelRequest, OllamaRequest
from ..openapi.pooling_schemas import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from ..openapi.request_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    ConversationAddition,
    ConversationRequest,
    ConversationUpdate,
    CountTokensRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from ..openapi.token_schemas import DerenderChatRequest, DerenderCompletionRequest, TokenGenerationRequest
from ..page.page_routes import page_routes, static_files
from ..pooling.pooling_api import PoolingApi, PoolingEndpoint
from ..pooling.scores import RerankApi, ScoreApi
from ..pooling.vectors import ClassifyApi, EmbeddingsApi, PoolApi
from ..records.volatile_lines import OF_MESSAGES, VolatileLine
from ..responses.conversations import Conversations
from ..responses.mcp_servers import McpServers
from ..responses.response_store import ResponseStore
from ..responses.responses import CompactApi, ResponsesApi
from ..responses.responses_endpoint import ResponsesEndpoint
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from ..settings.gateway_settings import GatewaySettings
from ..tenants.tenant_shares import TenantShares
from .status_routes import StatusRoutes, get
from .tokenize_routes import TokenizeRoutes

if TYPE_CHECKING:
    from ..http.body_files import BodyFiles
    from ..openai.transcriptions import TranscriptionsApi
    from ..records.media import FindStored

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
    own = described(settings.plugins)
    status = StatusRoutes(mesh.health, mesh.view, mesh.generator, host.metrics, mesh.models, own)
    return {
        **status.routes(),
        **(page_routes(meshes, host, counts, status.root, settings.page_kills) if settings.page else {}),
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
    servers: McpServers | None = None,
    files: "BodyFiles | None" = None,
    uploads: "Callable[[str], FindStored] | None" = None,
) -> Routes:
    """Return the routes whose requests name a model. ``store``: keeps the responses of all models. ``servers``: the MCP
    servers whose tools are run for them. ``files``: takes the files out of large bodies; None: no model reads any.
    ``uploads``: returns what finds the uploaded files of a tenant; None: none are kept."""
    limit, timeout, answers = settings.max_body_bytes, settings.request_timeout, TurnShare(ANSWERS_PER_TURN)
    silent = SilentStreams(settings.stream_head_after)
    chats = ChatApi(reader, mesh.plans)
    messages = MessagesApi(reader, chats)
    tokenize = TokenizeRoutes(
        parser, reader, mesh.tokenizers, mesh.health, mesh.models, limit, timeout, mesh.generator, files
    )
    moves = settings.volatile_lines == "move"
    of_messages = OF_MESSAGES if moves else None
    count_tokens = CountTokens(parser, reader, mesh.generator, mesh.models, limit, timeout, of_messages, files)
    responses = ResponsesApi(reader, chats, mesh.models, store, servers, uploads)

    def endpoint(
        api: GenerationApi, volatile: Sequence[VolatileLine] | None = () if moves else None
    ) -> GenerationEndpoint:
        return GenerationEndpoint(api, mesh.generator, mesh.models, parser, limit, answers, silent, volatile, files)

    def make_token_routes() -> Routes:
        from ..openai.token_generation import TokensApi  # here: most gateways are asked for texts
        from .render_routes import render_routes

        apis: tuple[GenerationApi, ...] = (chats, CompletionsApi(reader), TokensApi(reader))
        return render_routes(mesh, [endpoint(api) for api in apis], chats, timeout)

    conversations = Conversations(store)
    stored = ResponsesEndpoint(endpoint(responses), responses, mesh.generator, store, host)
    return {
        route_table.CHAT: endpoint(chats),
        route_table.COMPLETIONS: endpoint(CompletionsApi(reader)),
        route_table.MESSAGES: endpoint(messages, of_messages),
        route_table.COUNT_TOKENS: count_tokens,
        **ollama_routes(mesh, chats, endpoint, parser, limit, started_at()),
        route_table.RESPONSES: stored,
        route_table.RESPONSE: stored.retrieve,
        route_table.DELETE_RESPONSE: stored.delete,
        route_table.CANCEL_RESPONSE: stored.cancel,
        route_table.COMPACT_RESPONSE: endpoint(CompactApi(responses)),
        route_table.CREATE_CONVERSATION: conversations.create,
        route_table.CONVERSATION: conversations.retrieve,
        route_table.UPDATE_CONVERSATION: conversations.update,
        route_table.DELETE_CONVERSATION: conversations.delete,
        route_table.CONVERSATION_ITEMS: conversations.items,
        route_table.ADD_ITEMS: conversations.add,
        route_table.CONVERSATION_ITEM: conversations.item,
        route_table.DELETE_ITEM: conversations.delete_item,
        **tokenize.routes(),
        **made_later(route_table.OF_TOKENS, make_token_routes),
        **pooling_routes(mesh, parser, reader, limit),
    }


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


def made_later(routes: Sequence[Route], make: Callable[[], Routes]) -> Routes:
    """Return these routes, whose handlers are made when one of them is asked for the first time."""
    made = cache(make)

    def later(route: Route) -> Handler:
        async def handle(exchange: HttpExchange) -> None:
            await made()[route](exchange)

        return handle

    return {route: later(route) for route in routes}


def transcription_routes(settings: GatewaySettings, meshes: ServedMeshes, shares: TenantShares) -> Routes:
    """Return the routes of sounds, which read a form, and after it know of which model."""

    @cache
    def api() -> "TranscriptionsApi":
        from ..files.sound_uploads import SoundUploads  # here: most gateways transcribe nothing
        from ..openai.transcriptions import TranscriptionsApi

        uploads = SoundUploads(settings.max_audio_bytes, shares.sounds)
        alone = meshes.first if meshes.is_one else None
        return TranscriptionsApi(meshes.pick, alone, uploads, shares, settings.strict)

    async def transcribe(exchange: HttpExchange) -> None:
        await api().transcribe(exchange)

    async def translate(exchange: HttpExchange) -> None:
        await api().translate(exchange)

    return {route_table.TRANSCRIBE: transcribe, route_table.TRANSLATE: translate}


def pooling_routes(mesh: ServedMesh, parser: BodyParser, reader: BodyReader, max_body_bytes: int) -> Routes:
    """Return the routes of one model. ``max_body_bytes``: limits their bodies."""
    limits = mesh.generator.limits
    score, rerank = ScoreApi(reader, limits), RerankApi(reader, limits)
    apis: dict[Route, PoolingApi] = {
        route_table.EMBEDDINGS: EmbeddingsApi(reader),
        route_table.POOLING: PoolApi(reader, limits),
        route_table.CLASSIFY: ClassifyApi(reader, limits),
        **dict.fromkeys(route_table.SCORES, score),
        **dict.fromkeys(route_table.RERANKS, rerank),
        route_table.OLLAMA_EMBED: OllamaEmbedApi(reader, is_older=False),
        route_table.OLLAMA_EMBEDDINGS: OllamaEmbedApi(reader, is_older=True),
    }
    return {
        route: PoolingEndpoint(api, mesh.generator, mesh.models, parser, max_body_bytes) for route, api in apis.items()
    }


@cache
def _document(*, admin: bool, embeds: bool, batches: bool) -> bytes:
    return encode_json(document(admin=admin, embeds=embeds, batches=batches))


@cache
def _page() -> bytes:
    """Return the page that shows the document: it holds the style of the page at ``/``, which may not be served."""
    page, files = resources.files(__package__).joinpath("openapi.html").read_bytes(), static_files()
    # Inside of HTML the namespace of SVG goes without saying.
    icon = files["icon.svg"].content.replace(b' xmlns="http://www.w3.org/2000/svg"', b' width="26" aria-hidden="true"')
    return page.replace(b"/* base.css */", files["base.css"].content).replace(b"<!-- icon.svg -->", icon)


async def _docs(exchange: HttpExchange) -> None:
    # The page runs only its own script and connects only to its own server; no other page may show it in a frame.
    policy = (
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'"
    )
    headers = [(b"content-security-policy", policy)]
    await exchange.respond(200, _page(), b"text/html; charset=utf-8", headers)


def document_routes(limits_of: Callable[[], types_pb2.ModelLimits | None], *, admin: bool, batches: bool) -> Routes:
    """Return the routes of the document. ``limits_of``: returns those of the served model, if they are known.
    ``admin``: the gateway has admin routes; ``batches``: it has files and batches."""

    async def openapi(exchange: HttpExchange) -> None:
        limits = limits_of()
        embeds = limits is not None and limits.hidden_size > 0
        await exchange.respond(200, _document(admin=admin, embeds=embeds, batches=batches))

    return {route_table.DOCUMENT: openapi, route_table.DOCUMENT_PAGE: _docs}


_BODIES: tuple[type[msgspec.Struct], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
    ResponsesRequest,
    OllamaRequest,
    OllamaEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    ClassifyRequest,
    ScoreRequest,
    RerankRequest,
    OllamaModelRequest,
    ConversationRequest,
    ConversationUpdate,
    ConversationAddition,
    TokenGenerationRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
)
READ_FIELDS = frozenset(
    {
        *(name for model in _BODIES for name in model.__struct_fields__),
        *SAMPLING_FIELDS,
        *NOT_SUPPORTED_YET,
        *RENAMED,
    }
)
"""The fields whose values some endpoint reads."""
