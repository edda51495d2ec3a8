"""Opens the two servers of the gateway: gRPC on the host's server, and the application behind HTTP."""

import time

from google.protobuf.message import Message

from tokenloom.services.runtime.addresses import parse
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.certificate import wait_for_files
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc

from .grpc.inference_servicer import InferenceServicer
from .grpc.message_bounds import bounded
from .grpc.observed_calls import observe_calls
from .http.app import App, ClientAccess
from .http.browser_guard import BrowserGuard
from .http.json_body import BodyParser
from .http.response_counts import GRPC, ResponseCounts
from .http.route import Routes
from .kserve.kserve_servicer import KServeServicer
from .mesh.engine_calls import EngineCalls
from .model_router import ModelRouter
from .openai.body_reader import BodyReader
from .request_log.access_log import AccessLog, FinishedRequests
from .request_log.finished_request import RecentRequests
from .responses.response_store import ResponseStore
from .routes.admin_routes import AdminRoutes, request_routes
from .routes.api_routes import ERROR_FORMS, api_routes, status_routes
from .routes.lora_routes import LoraRoutes
from .routes.models_routes import ModelsRoutes
from .serving.served_mesh import ServedMesh
from .serving.served_meshes import ServedMeshes
from .settings.gateway_settings import GatewaySettings
from .tenants.api_keys import ApiKeys, admit_calls
from .tenants.tenant_shares import TenantShares


async def open_servers(
    settings: GatewaySettings,
    host: Host,
    meshes: ServedMeshes,
    keys: ApiKeys,
    shares: TenantShares,
    parser: BodyParser,
    counts: ResponseCounts,
    batch_routes: Routes,
) -> App:
    """Add the gRPC services to the host's server and return the HTTP application. Waits for the operator's certificate
    where the admin routes need one."""
    admin_keys = ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file)
    reader = BodyReader(strict=settings.strict)
    finished = FinishedRequests(RecentRequests(), AccessLog(time.monotonic) if settings.access_log else None)
    host.authorize_calls(admit_calls(keys))
    host.observe_calls(observe_calls(ResponseCounts(host.metrics, GRPC), finished))
    _add_grpc_services(settings, host, meshes, shares, reader)
    store = ResponseStore(settings.max_stored_response_bytes, is_shared=shares.is_shared)

    def routes_of(mesh: ServedMesh) -> Routes:
        return api_routes(settings, host, mesh, parser, reader, store)

    if meshes.is_one:
        routes = routes_of(meshes.first)
    else:
        door = ModelRouter(meshes, routes_of, max_body_bytes=settings.max_body_bytes)
        routes = {**door.routes(), **ModelsRoutes(meshes).routes()}
    routes = {**status_routes(settings, host, meshes, counts), **routes, **batch_routes}
    guard = BrowserGuard(parse(settings.http_listen), settings.allowed_hosts, settings.cors_origins)
    routes |= await _admin_routes(settings, host, meshes, finished.recent)
    access = ClientAccess(keys, admin_keys, guard, shares, settings.cors_origins)
    return App(routes, access, counts, finished, ERROR_FORMS)


def _add_grpc_services(
    settings: GatewaySettings, host: Host, meshes: ServedMeshes, shares: TenantShares, reader: BodyReader
) -> None:
    inference = InferenceServicer(meshes, shares, settings.request_timeout)
    generates: dict[str, type[Message]] = dict.fromkeys(("Generate", "GenerateSession"), inference_pb2.GenerateRequest)
    generates["Resume"] = inference_pb2.InferenceResumeRequest
    generates["Cancel"] = inference_pb2.InferenceCancelRequest
    generates["Embed"], generates["Classify"] = inference_pb2.EmbedRequest, inference_pb2.ClassifyRequest
    generates["Score"], generates["Pool"] = inference_pb2.ScoreRequest, inference_pb2.PoolRequest
    host.add_servicer(bounded(inference_pb2_grpc.add_InferenceServicer_to_server, generates), inference)
    kserve = KServeServicer(reader, meshes, shares, settings.request_timeout)
    infers = dict.fromkeys(("ModelInfer", "ModelStreamInfer"), grpc_service_pb2.ModelInferRequest)
    host.add_servicer(bounded(grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, infers), kserve)


async def _admin_routes(settings: GatewaySettings, host: Host, meshes: ServedMeshes, recent: RecentRequests) -> Routes:
    if not settings.has_admin:
        return {}
    channels = host.channels
    if (files := settings.operator_certificate) is not None:
        await wait_for_files(files)
        tls = MeshTLS(files)
        channels = Channels(tls)
        host.certificates.show("operator", tls.expiry)
    calls = EngineCalls(channels, settings.request_timeout)
    admin, lora = AdminRoutes(meshes, calls), LoraRoutes(meshes, calls)
    return {**admin.routes(), **lora.routes(), **request_routes(recent)}
