"""Which names in a certificate identify a caller."""

import contextlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from tests.services.runtime.peers.issuing import authority, issue, write
from tokenloom.request.errors import PermissionDenied
from tokenloom.services.runtime.host.servicer_edge import Edge
from tokenloom.services.runtime.peers.callers import CALLERS, check_caller
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import tokenizer_pb2 as pb
from tokenloom.v1 import tokenizer_pb2_grpc

GATEWAY = "gateway.tokenloom.internal"

_ADMIN = "/tokenloom.v1.EngineAdmin/"


class Tokenizer(tokenizer_pb2_grpc.TokenizerServicer):
    async def GetTokenizerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetTokenizerInfoResponse()


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ([x509.DNSName(GATEWAY)], grpc.StatusCode.OK),
        ([x509.DNSName("somewhere.example"), x509.DNSName(GATEWAY)], grpc.StatusCode.OK),
        ([x509.DNSName("engine.tokenloom.internal")], grpc.StatusCode.PERMISSION_DENIED),
        ([x509.UniformResourceIdentifier(GATEWAY)], grpc.StatusCode.UNAUTHENTICATED),
        ([x509.RFC822Name(GATEWAY), x509.DNSName("somewhere.example")], grpc.StatusCode.UNAUTHENTICATED),
        ([], grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_only_dns_names_identify_a_caller(
    tmp_path: Path, names: list[x509.GeneralName], code: grpc.StatusCode
) -> None:
    signer = authority()
    own = MeshTLS(write(tmp_path / "own", signer, issue(signer, x509.DNSName("tokenizer.tokenloom.internal"))))
    caller = MeshTLS(write(tmp_path / "caller", signer, issue(signer, *names)))
    edge = Edge(check_caller)
    edge.add_servicer(tokenizer_pb2_grpc.add_TokenizerServicer_to_server, Tokenizer())
    edge.is_ready = True
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((edge,))
    port = server.add_secure_port("127.0.0.1:0", own.server_credentials())
    await server.start()
    try:
        async with Channels(caller).open(f"127.0.0.1:{port}", "tokenizer") as channel:
            stub = tokenizer_pb2_grpc.TokenizerStub(channel)
            assert await stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest(), timeout=20).code() is code
    finally:
        await server.stop(0)


@pytest.mark.parametrize(("method", "refused"), [("WatchKVEvents", False), ("SetRole", True), ("Pause", True)])
def test_a_coordinator_reads_the_events_of_engines_and_changes_nothing(method: str, refused: bool) -> None:
    with pytest.raises(PermissionDenied) if refused else contextlib.nullcontext():
        check_caller(_ADMIN + method, _caller("coordinator"))


def test_the_planner_follows_the_coordinator_and_changes_roles_and_nothing_else() -> None:
    allowed = {f"{_ADMIN}SetRole", "/tokenloom.v1.Coordinator/Watch"}
    others = {prefix if not prefix.endswith("/") else f"{prefix}Any" for prefix in CALLERS} - allowed
    for method in allowed:
        check_caller(method, _caller("planner"))
    for method in {*others, f"{_ADMIN}Pause"}:
        with pytest.raises(PermissionDenied):
            check_caller(method, _caller("planner"))


def _caller(name: str) -> Any:
    """Return the context of a call by the part with this name in its certificate."""

    class Context:
        def auth_context(self) -> dict[str, list[bytes]]:
            return {"peer_dns": [f"{name}.tokenloom.internal".encode()]}

    return Context()
