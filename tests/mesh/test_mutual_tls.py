"""A mesh whose services identify each other by their certificates."""

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.mesh.split import SplitMesh
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.peers import certificate
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles, dns_name
from tokenloom.services.runtime.peers.channels import Channels, open_channel
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.supervisor.certificates import make_certificates
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


async def test_new_certificates_need_no_restart(
    socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "CHECK_SECONDS", 0.0)
    make_certificates(tmp_path / "mesh", days=30)
    make_certificates(tmp_path / "new", days=30)
    public = {"public_tls_cert": tmp_path / "mesh/gateway.crt", "public_tls_key": tmp_path / "mesh/gateway.key"}
    async with Mesh(socket_dir, gateway=public, certificates=tmp_path / "mesh").running() as mesh:
        url = mesh.url.replace("http:", "https:")

        async def complete(ca: Path) -> list[int]:
            context = ssl.create_default_context(cafile=str(ca))
            context.check_hostname = False
            async with httpx.AsyncClient(base_url=url, verify=context, timeout=SOON) as https:
                body = {"prompt": "one two", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
                answer = (await https.post("/v1/completions", json=body)).json()["choices"][0]
                return list(answer["token_ids"])

        def public_gateway_channel(ca: Path) -> grpc.aio.Channel:
            options = [("grpc.ssl_target_name_override", dns_name("gateway")), ("grpc.use_local_subchannel_pool", 1)]
            credentials = grpc.ssl_channel_credentials(ca.read_bytes())
            return grpc.aio.secure_channel(mesh.address("gateway-0"), credentials, options=options)

        old_ca = tmp_path / "old.crt"
        old_ca.write_bytes((tmp_path / "mesh/ca.crt").read_bytes())
        before = await complete(old_ca)
        for path in (tmp_path / "new").iterdir():
            (tmp_path / "mesh" / path.name).write_bytes(path.read_bytes())
        new_ca = tmp_path / "new/ca.crt"
        assert await complete(new_ca) == before
        with pytest.raises(httpx.TransportError):
            await complete(old_ca)
        async with public_gateway_channel(new_ca) as channel:
            await asyncio.wait_for(channel.channel_ready(), SOON)
        # A tokenizer that starts now knows only the new authority; the gateway that was there finds it.
        await mesh.tokenizers[0].kill()
        await mesh.tokenizers[0].start()
        async with asyncio.timeout(SOON):
            while (await _status(url, new_ca)) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await complete(new_ca) == before


async def _status(url: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    context.check_hostname = False
    async with httpx.AsyncClient(base_url=url, verify=context) as https:
        return (await https.get("/health")).status_code


def peer_of(certificates: Path, mesh: Mesh, part: str | None = "operator") -> httpx.AsyncClient:
    """Return a client of the internal listener, with the certificate of a part."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    context.check_hostname = False  # a certificate of the mesh names a service and no host
    if part is not None:
        context.load_cert_chain(certificates / f"{part}.crt", certificates / f"{part}.key")
    assert isinstance(mesh.gateway.service, GatewayService)
    return httpx.AsyncClient(base_url=f"https://{mesh.gateway.service.internal_address}", verify=context, timeout=SOON)


KV: dict[str, Any] = {"engine": {"kv_transports": ("socket",), "kv_socket_listen": "127.0.0.1:0"}}
PROMPT = list(range(40, 104))
HOLD = {
    "token_ids": PROMPT,
    "sampling_params": {"max_tokens": 1, "ignore_eos": True},
    "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None},
}
READ = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "ignore_eos": True}}


async def generate(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/inference/v1/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_peer_joins_prefill_and_decode_itself(socket_dir: Path, certificates: Path, *, stream: bool) -> None:
    settings = {**KV, "gateway": {"internal_listen": "127.0.0.1:0"}, "certificates": certificates}
    async with SplitMesh(socket_dir, **settings).running() as mesh, peer_of(certificates, mesh) as peer:
        expected = mesh.expected(PROMPT, 9)
        prefilled = await generate(peer, HOLD)
        assert prefilled["choices"][0]["token_ids"] == expected[:1]
        assert prefilled["choices"][0]["finish_reason"] == "length"
        params = prefilled["kv_transfer_params"]
        prefill, decode = mesh.of_role("prefill"), mesh.of_role("decode")
        assert params["remote_engine_id"] == prefill.name
        assert (params["remote_num_tokens"], params["first_token_id"]) == (len(PROMPT), expected[0])
        assert prefill.stats.num_leases == 1, "it outlives its request"
        body = READ | {"kv_transfer_params": params, "stream": stream}
        if stream:
            async with peer.stream("POST", "/inference/v1/generate", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            found = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
        else:
            answer = await generate(peer, body)
            found = answer["choices"][0]["token_ids"]
            assert answer["kv_transfer_params"] is None
        assert found == expected
        assert decode.stats.kv_blocks_received > 0
        assert not decode.recomputes()


async def test_kv_that_is_gone_is_computed_again(socket_dir: Path, certificates: Path) -> None:
    settings = {**KV, "gateway": {"internal_listen": "127.0.0.1:0"}, "certificates": certificates}
    async with SplitMesh(socket_dir, **settings).running() as mesh, peer_of(certificates, mesh) as peer:
        params = (await generate(peer, HOLD))["kv_transfer_params"]
        lost = params | {"remote_lease_id": "00" * 16}
        answer = await generate(peer, READ | {"kv_transfer_params": lost})
        assert answer["choices"][0]["token_ids"] == mesh.expected(PROMPT, 9)
        assert sum(mesh.of_role("decode").recomputes().values()) == 1
        other = await generate(peer, READ | {"token_ids": PROMPT[::-1], "kv_transfer_params": params})
        assert sum(mesh.of_role("decode").recomputes().values()) == 2, "the lease is of another prompt"
        assert other["choices"][0]["token_ids"][1:]


async def test_kv_that_nobody_reads_is_given_back(socket_dir: Path, certificates: Path) -> None:
    settings = {"engine": KV["engine"] | {"kv_lease_seconds": 0.3}, "gateway": {"internal_listen": "127.0.0.1:0"}}
    async with (
        SplitMesh(socket_dir, **settings, certificates=certificates).running() as mesh,
        peer_of(certificates, mesh) as peer,
    ):
        assert (await generate(peer, HOLD))["kv_transfer_params"]
        await mesh.check_nothing_is_left()


@pytest.mark.parametrize(("role", "options"), [("both", KV["engine"]), ("decode", {"kv_transports": ("shm",)})])
async def test_kv_that_is_there_already_is_held_no_longer(
    socket_dir: Path, certificates: Path, role: str, options: dict[str, Any]
) -> None:
    """Also by an engine whose memory no other maps: its lease lasted to its end, and new weights waited for that."""
    settings = {"engine": options, "gateway": {"internal_listen": "127.0.0.1:0"}, "certificates": certificates}
    async with SplitMesh(socket_dir, (role,), **settings).running() as mesh, peer_of(certificates, mesh) as peer:
        (engine,) = mesh.engines
        params = (await generate(peer, HOLD))["kv_transfer_params"]
        assert engine.stats.num_leases == 1
        answer = await generate(peer, READ | {"kv_transfer_params": params})
        assert answer["choices"][0]["token_ids"] == mesh.expected(PROMPT, 9)
        assert not engine.stats.num_leases
        assert not engine.recomputes()
        again = await generate(peer, READ | {"kv_transfer_params": params})
        assert again["choices"] == answer["choices"]


async def test_kv_parameters_are_refused_elsewhere(socket_dir: Path, certificates: Path) -> None:
    settings = {**KV, "gateway": {"internal_listen": "127.0.0.1:0"}, "certificates": certificates}
    async with SplitMesh(socket_dir, **settings).running() as mesh, peer_of(certificates, mesh) as peer:
        params = (await generate(peer, HOLD))["kv_transfer_params"]
        async with mesh.http() as http:
            for body in (HOLD, READ | {"kv_transfer_params": params}):
                refused = await http.post("/inference/v1/generate", json=body)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "kv_transfer_params"
                assert "only for peers with a certificate" in refused.text
        async with peer_of(certificates, mesh, None) as stranger:
            with pytest.raises(httpx.HTTPError):
                await stranger.post("/inference/v1/generate", json=READ)
        changed = [
            ({"remote_engine_id": "engine-9"}, "the registry has no engine 'engine-9'"),
            ({"remote_engine_epoch": "1"}, "of this incarnation"),
            ({"remote_lease_id": "abc"}, "not what a prefill has returned"),
            ({"remote_weights": "abc"}, "not what a prefill has returned"),
            ({"remote_weights": "00" * 31}, "remote_weights is not what a prefill has returned"),
            ({"remote_weights": 5}, "not what a prefill has returned"),
            ({"remote_num_tokens": None}, "remote_num_tokens is missing"),
            ({"remote_num_tokens": 3}, "the KV covers 3 tokens, and the prompt has 64"),
            ({"first_token_id": 10**6}, "first_token_id 1000000 is not below"),
            ({"do_remote_decode": True}, "one of do_remote_decode and do_remote_prefill"),
            ({"host": "example.com"}, "host is unknown"),
        ]
        for change, reason in changed:
            refused = await peer.post("/inference/v1/generate", json=READ | {"kv_transfer_params": params | change})
            assert refused.status_code == 400, change
            assert reason in refused.json()["error"]["message"]
        for fields, reason in (
            ({"max_tokens": 2}, "send max_tokens 1"),
            ({"max_tokens": 1, "n": 2, "temperature": 1}, "has one output"),
        ):
            refused = await peer.post("/inference/v1/generate", json=HOLD | {"sampling_params": fields})
            assert reason in refused.json()["error"]["message"]


async def test_a_peer_needs_a_key_too(socket_dir: Path, certificates: Path) -> None:
    gateway = {"internal_listen": "127.0.0.1:0", "api_key": ("sesame",)}
    async with (
        SplitMesh(socket_dir, **KV, gateway=gateway, certificates=certificates).running() as mesh,
        peer_of(certificates, mesh) as peer,
    ):
        assert (await peer.post("/inference/v1/generate", json=HOLD)).status_code == 401
        peer.headers["authorization"] = "Bearer sesame"
        assert (await generate(peer, HOLD))["kv_transfer_params"]["do_remote_prefill"]


async def test_an_engine_that_serves_no_kv_holds_none(socket_dir: Path, certificates: Path) -> None:
    gateway = {"internal_listen": "127.0.0.1:0"}
    async with (
        Mesh(socket_dir, gateway=gateway, certificates=certificates).running() as mesh,
        peer_of(certificates, mesh) as peer,
    ):
        refused = await peer.post("/inference/v1/generate", json=HOLD)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv_transfer_params"
        assert "serves no KV to other engines" in refused.json()["error"]["message"]
        by_name = await peer.post("/inference/v1/generate", json=READ, headers={"host": "gateway.example"})
        assert by_name.status_code == 200, "the guard against web pages does not ask peers"


def test_an_internal_listener_needs_certificates() -> None:
    parts = {"tokenizers": "a:1", "output_processors": "a:1", "coordinator": "a:1"}
    with pytest.raises(ValueError, match="--internal-listen needs --tls-ca"):
        GatewaySettings.of(**parts, internal_listen="127.0.0.1:0")
