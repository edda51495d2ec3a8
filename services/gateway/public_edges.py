"""Both edges of a gateway, gRPC and HTTP, over what it serves."""

from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2_grpc

from .gateway_settings import GatewaySettings
from .generation.served import Served
from .grpc.inference_servicer import InferenceServicer
from .http.admin_routes import AdminRoutes
from .http.app import App, Routes
from .http.auth import ApiKeys
from .http.cors import Cors
from .http.endpoint import Endpoint
from .http.routes import StatusRoutes
from .http.tokenize_routes import TokenizeRoutes
from .kserve.kserve_servicer import KServeServicer
from .mesh.engine_admins import EngineAdmins
from .openai.chat import ChatApi
from .openai.completions import CompletionsApi
from .openai.openai_models import BodyReader
from .openapi.openapi_routes import document_routes


async def open_edges(settings: GatewaySettings, host: Host, served: Served) -> App:
    """Adds the gRPC services to the host's server and returns the HTTP application. Waits for the operator's
    certificate where the admin routes need one."""
    keys = ApiKeys.load(settings.api_key, settings.api_key_file)
    reader = BodyReader(strict=settings.strict)
    completions = CompletionsApi(reader, served.model)
    host.authorize_calls(keys.authorize_call)
    _add_servicers(settings, host, served, completions)
    return App(
        {
            **StatusRoutes(served.health, served.mesh, served.generator, host.metrics, served.model).routes(),
            **document_routes(served.health, admin=settings.has_admin),
            **_endpoints(settings, served, reader, completions),
        },
        keys,
        await _admin_routes(settings, host, served),
        ApiKeys.load(settings.admin_api_key, settings.admin_api_key_file),
        Cors(settings.cors_origins) if settings.cors_origins else None,
    )


def _add_servicers(settings: GatewaySettings, host: Host, served: Served, completions: CompletionsApi) -> None:
    inference = InferenceServicer(served.generator, served.health, served.model, served.plans, settings.request_timeout)
    host.add_servicer(inference_pb2_grpc.add_InferenceServicer_to_server, inference)
    kserve = KServeServicer(completions, served.generator, served.health, served.model)
    host.add_servicer(grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, kserve)


def _endpoints(settings: GatewaySettings, served: Served, reader: BodyReader, completions: CompletionsApi) -> Routes:
    limit = settings.max_body_bytes
    chats = ChatApi(reader, served.model, served.plans)
    tokenize = TokenizeRoutes(
        reader,
        served.tokenizers,
        served.health,
        served.model,
        max_body_bytes=limit,
        timeout=settings.request_timeout,
    )
    return {
        "/v1/chat/completions": {"POST": Endpoint(chats, served.generator, served.model, max_body_bytes=limit)},
        "/v1/completions": {"POST": Endpoint(completions, served.generator, served.model, max_body_bytes=limit)},
        **tokenize.routes(),
    }


async def _admin_routes(settings: GatewaySettings, host: Host, served: Served) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await files.wait()
        channels = Channels(MeshTLS(files))
    return AdminRoutes(EngineAdmins(served.mesh, channels), timeout=settings.request_timeout).routes()
