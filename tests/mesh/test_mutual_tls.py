"""A mesh whose services identify each other by their certificates."""

import ssl
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.mesh.split import SplitMesh
from tokenloom.certificates import make_certificates
from tokenloom.services.runtime.peers.channels import Channels, open_channel
from tokenloom.services.runtime.peers.tls import CertificateFiles, MeshTLS
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, engine_pb2, engine_pb2_grpc, tokenizer_pb2
from tokenloom.v1.tokenizer_pb2_grpc import TokenizerStub


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, days=30)
    return folder


def channels_of(certificates: Path, part: str) -> Channels:
    files = CertificateFiles(certificates / "ca.crt", certificates / f"{part}.crt", certificates / f"{part}.key")
    return Channels(MeshTLS(files))


async def complete(mesh: Mesh, prompt: str, max_tokens: int = 5) -> httpx.Response:
    async with mesh.http() as http:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return await http.post("/v1/completions", json=body | {"return_token_ids": True})


async def test_a_request_goes_through_and_kv_moves_under_tls(socket_dir: Path, certificates: Path) -> None:
    engine = {"kv_transports": ("socket",), "kv_socket_listen": "127.0.0.1:0"}
    async with SplitMesh(socket_dir, engine=engine, certificates=certificates).running() as mesh:
        answer = (await complete(mesh, "one two three four five six seven eight " * 4, 9)).json()
        choice = answer["choices"][0]
        assert choice["token_ids"] == mesh.expected(choice["prompt_token_ids"], 9)
        decode = mesh.of_role("decode")
        assert decode.stats.kv_blocks_received > 0
        assert decode.stats.kv_bytes_received.keys() == {"socket"}
        assert not decode.recomputes()


async def test_a_peer_without_a_certificate_is_refused(socket_dir: Path, certificates: Path) -> None:
    async with Mesh(socket_dir, certificates=certificates).running() as mesh:
        async with open_channel(mesh.address("tokenizer-0")) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await TokenizerStub(channel).GetTokenizerInfo(tokenizer_pb2.GetTokenizerInfoRequest(), timeout=SOON)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_name_in_the_certificate_decides_the_allowed_calls(socket_dir: Path, certificates: Path) -> None:
    async with Mesh(socket_dir, certificates=certificates).running() as mesh:

        async def pause(part: str) -> grpc.StatusCode:
            async with channels_of(certificates, part).open(mesh.address("engine-0"), "engine") as channel:
                try:
                    await engine_pb2_grpc.EngineAdminStub(channel).GetEngineInfo(
                        engine_pb2.GetEngineInfoRequest(), timeout=SOON
                    )
                except grpc.aio.AioRpcError as error:
                    return error.code()
            return grpc.StatusCode.OK

        assert await pause("operator") is grpc.StatusCode.OK
        for part in ("tokenizer", "output-processor", "gateway", "engine", "prometheus"):
            assert await pause(part) is grpc.StatusCode.PERMISSION_DENIED, part

        async with channels_of(certificates, "tokenizer").open(mesh.address("coordinator-0"), "coordinator") as channel:
            watch = coordinator_pb2_grpc.CoordinatorStub(channel).Watch(coordinator_pb2.WatchRequest(), timeout=SOON)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watch.read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert refused.value.details() == "tokenizer may not call Coordinator"


async def test_a_part_that_poses_as_another_is_not_talked_to(socket_dir: Path, certificates: Path) -> None:
    async with Mesh(socket_dir, certificates=certificates).running() as mesh:
        async with channels_of(certificates, "operator").open(mesh.address("engine-0"), "coordinator") as channel:
            watch = coordinator_pb2_grpc.CoordinatorStub(channel).Watch(coordinator_pb2.WatchRequest(), timeout=SOON)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watch.read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_public_edge_shows_a_certificate_and_asks_for_none(socket_dir: Path, certificates: Path) -> None:
    gateway = {"public_tls_cert": certificates / "gateway.crt", "public_tls_key": certificates / "gateway.key"}
    async with Mesh(socket_dir, gateway=gateway, certificates=certificates).running() as mesh:
        context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        context.check_hostname = False
        async with httpx.AsyncClient(base_url=mesh.url.replace("http:", "https:"), verify=context) as https:
            assert (await https.get("/health")).status_code == 200
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{mesh.url}/health")
