"""Lists the routes of the HTTP API, except those for operators."""

from tokenloom.services.runtime.host.host import Host

from ..anthropic.count_tokens import CountTokens
from ..anthropic.message_routes import message_routes
from ..anthropic.messages import MessagesApi
from ..http.app import Routes
from ..http.endpoint import GenerationApi, GenerationEndpoint
from ..http.json_body import BodyParser
from ..http.response_counts import ResponseCounts
from ..http.turn_share import ANSWERS_PER_TURN, TurnShare
from ..openai.body_reader import BodyReader
from ..openai.chat import ChatApi
from ..openai.completions import CompletionsApi
from ..page.page_routes import page_routes
from ..responses.response_routes import response_routes
from ..responses.response_store import ResponseStore
from ..responses.responses import ResponsesApi
from ..responses.responses_endpoint import ResponsesEndpoint
from ..serving.served_mesh import ServedMesh
from ..serving.served_meshes import ServedMeshes
from ..settings.gateway_settings import GatewaySettings
from .ollama_routes import ollama_routes
from .openapi_routes import document_routes
from .pooling_routes import pooling_routes
from .status_routes import StatusRoutes, get, ollama_tags
from .tokenize_routes import TokenizeRoutes


def status_routes(settings: GatewaySettings, host: Host, meshes: ServedMeshes, counts: ResponseCounts) -> Routes:
    """Return the routes that describe the gateway and, of several meshes, the first one."""
    mesh = meshes.first
    status = StatusRoutes(mesh.health, mesh.view, mesh.generator, host.metrics, mesh.models)
    return {
        **status.routes(),
        **(page_routes(meshes, host, counts, status.root) if settings.page else {}),
        "/api/tags": get(lambda: ollama_tags(meshes.listed())),
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
    chats = ChatApi(reader, mesh.plans)
    messages = MessagesApi(reader, chats)
    tokenize = TokenizeRoutes(parser, reader, mesh.tokenizers, mesh.health, mesh.models, limit, timeout)
    count_tokens = CountTokens(parser, reader, mesh.tokenizers, mesh.models, limit, timeout)
    responses = ResponsesApi(reader, chats, mesh.models, store)

    def endpoint(api: GenerationApi) -> GenerationEndpoint:
        return GenerationEndpoint(api, mesh.generator, mesh.models, parser, limit, answers)

    return {
        "/v1/chat/completions": {"POST": endpoint(chats)},
        "/v1/completions": {"POST": endpoint(CompletionsApi(reader))},
        **message_routes(endpoint(messages), count_tokens),
        **ollama_routes(chats, endpoint, mesh.health),
        **response_routes(ResponsesEndpoint(endpoint(responses), responses, mesh.generator, store, host)),
        **tokenize.routes(),
        **pooling_routes(mesh, parser, reader, limit),
    }
