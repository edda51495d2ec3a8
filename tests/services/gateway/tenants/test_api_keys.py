"""Who comes in: over HTTP and gRPC, with keys from flags and files."""

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.loop_clock import settle
from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway.tenants import api_keys
from tokenloom.services.gateway.tenants.api_keys import ApiKeys, PluggedKeys
from tokenloom.services.gateway.tenants.tenant import NO_TENANT, CacheSalts
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

KEY = "sk-right"
SALTS = CacheSalts(b"0123456789abcdef")


def test_keys_from_flags_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{hashlib.sha256(b'from file').hexdigest().upper()}  # Ada's\n")
    keys = ApiKeys.load(["from flag"], file)
    keys.authorize(b"Bearer from flag")
    keys.authorize(b"bearer from file")
    for wrong in (None, b"", b"Bearer", b"Bearer ", b"Basic from flag", b"from flag", b"Bearer from", b"Bearer \xff"):
        with pytest.raises(errors.Unauthenticated):
            keys.authorize(wrong)


def test_a_file_of_plain_keys_is_refused_without_telling_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-secret\n")
    with pytest.raises(errors.InvalidArgument, match="line 1") as caught:
        ApiKeys.load([], file)
    assert "secret" not in str(caught.value)


def test_each_plain_key_is_a_tenant_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"from file").hexdigest()
    file.write_text(f"{digest}\n{digest}\n")
    keys = ApiKeys.load(["from flag", "from file"], file, SALTS)
    tenants = [keys.authorize(f"Bearer {key}".encode()) for key in ("from flag", "from file")]
    assert tenants[1].name == f"key:{digest[:16]}"
    assert len({tenant.name for tenant in tenants}) == len({tenant.cache_salt for tenant in tenants}) == 2
    assert tenants[1] == ApiKeys.load(["from file"], None, SALTS).authorize(b"Bearer from file")
    assert tenants[1] != ApiKeys.load(["from file"], None).authorize(b"Bearer from file"), "the salt is random"


def test_tenants_of_a_file_share_a_cache_by_its_name_only(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    tables = []
    for name, cache in (("a", None), ("b", "a"), ("c", "d"), ("e", None)):
        line = f'cache = "{cache}"\n' if cache else ""
        tables.append(
            f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{hashlib.sha256(name.encode()).hexdigest()}"]\n{line}'
        )
    file.write_text("\n".join([*tables, "[tenant.limits]\nsessions = 3\n"]))
    keys = ApiKeys.load(["flag"], file, SALTS)
    a, b, c, e, flag = (keys.authorize(f"Bearer {key}".encode()) for key in ("a", "b", "c", "e", "flag"))
    assert a.cache_salt == b.cache_salt
    assert len({a.cache_salt, c.cache_salt, e.cache_salt, flag.cache_salt}) == 4
    assert (a.name, e.limits.sessions, a.limits.sessions) == ("a", 3, None)
    assert a.cache_salt.hex() not in f"{a}"


def test_a_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    table = f'[[tenant]]\nname = "%s"\nkey_sha256 = ["{hashlib.sha256(b"k").hexdigest()}"]\n'
    file.write_text(table % "a" + table % "b")
    with pytest.raises(errors.InvalidArgument, match="for tenant 'a' and for tenant 'b'"):
        ApiKeys.load([], file, SALTS)
    file.write_text(table % "a")
    with pytest.raises(errors.InvalidArgument, match="as --api-key and for tenant 'a'"):
        ApiKeys.load(["k"], file, SALTS)


def test_operators_belong_to_no_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{hashlib.sha256(b'k').hexdigest()}\n")
    keys = ApiKeys.load_admin(["flag"], file)
    assert keys.authorize(b"Bearer k") is keys.authorize(b"Bearer flag") is NO_TENANT
    file.write_text("[[tenant]]\n")
    with pytest.raises(errors.InvalidArgument, match="admin_api_key_file: line 1"):
        ApiKeys.load_admin([], file)


def test_without_keys_every_client_is_of_one_tenant() -> None:
    assert ApiKeys.load([], None).authorize(None) is NO_TENANT


def test_an_empty_file_accepts_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nobody yet\n")
    with pytest.raises(errors.Unauthenticated):
        ApiKeys.load([], file).authorize(b"Bearer x")


async def test_http_without_a_key(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=(KEY,)) as mesh, mesh.http() as http:
        for path in (
            "/v1/models",
            "/metrics",
            "/version",
            "/no/such/path",
            "/v1/completions",
            "/health/",
        ):
            response = await http.get(path, headers={"host": "localhost"})
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"
        body = {"model": MODEL, "prompt": "a"}
        assert (await http.post("/v1/completions", json=body)).status_code == 401
        assert mesh.outputs.requests.empty()
        for path in ("/health", "/ping"):
            assert (await http.get(path)).status_code == 200
        mesh.outputs.auto = ["ok"]
        right = {"authorization": f"Bearer {KEY}"}
        assert (await http.post("/v1/completions", json=body, headers=right)).status_code == 200
        wrong = {"authorization": f"Bearer {KEY}x"}
        assert (await http.post("/v1/completions", json=body, headers=wrong)).status_code == 401


async def test_grpc_without_a_key(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(api_key=(KEY,)) as mesh, open_channel(mesh.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(model=MODEL, text="a")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stub.Generate(request)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(reflect))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        mesh.outputs.auto = ["ok"]
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),))
        assert "".join([response.text async for response in call]) == "ok"


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_a_key_file_is_read_again_while_requests_come(
    socket_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that was taken out of the file was accepted until the gateway's restart."""
    monkeypatch.setattr(api_keys, "CHECK_SECONDS", 0.01)
    file, admin_file = tmp_path / "keys", tmp_path / "admin"
    file.write_text(digest_of("old"))
    admin_file.write_text(digest_of("old"))
    options = {"api_key_file": file, "admin_api_key_file": admin_file}
    async with FakeMesh(socket_dir).gateway(**options) as mesh, mesh.http() as http:

        async def accepts(key: str, path: str = "/v1/models") -> bool:
            return (await http.get(path, headers={"authorization": f"Bearer {key}"})).status_code == 200

        async def becomes(key: str, path: str = "/v1/models") -> None:
            async with asyncio.timeout(30):
                while not await accepts(key, path):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        assert await accepts("old")
        assert not await accepts("new")
        file.write_text(f"{digest_of('old')}\n{digest_of('new')}")
        await becomes("new")
        assert await accepts("old")
        file.write_text(digest_of("new"))
        async with asyncio.timeout(30):
            while await accepts("old"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        file.write_text("[[tenant")
        async with asyncio.timeout(30):
            while "the keys stay as they are" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await accepts("new")
        file.unlink()
        other = tmp_path / "other"
        other.write_text(f'[[tenant]]\nname = "a"\nkey_sha256 = ["{digest_of("of a")}"]\n')
        other.rename(file)
        await becomes("of a")
        assert not await accepts("new")


async def test_a_file_that_is_being_written_refuses_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(digest_of("a"))
    keys = ApiKeys.load([], file, SALTS)
    seen = [((1, 64, 1),), ((1, 0, 2),), ((1, 32, 3),), ((1, 64, 4),), ((1, 64, 4),), ((1, 64, 4),)]
    looks = iter(seen)
    monkeypatch.setattr(api_keys, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(api_keys, "_signature", lambda file: next(looks, seen[-1]))
    loads: list[int] = []

    def load() -> ApiKeys:
        loads.append(len([*looks]))  # how many looks were left
        return ApiKeys.load([], file, SALTS)

    following = asyncio.create_task(keys.follow(file, load))
    await settle(20)
    following.cancel()
    assert loads == [1], "once, when it had stayed as it was between two looks"


async def test_a_file_that_cannot_be_read_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys.load(["a"], None, SALTS)
    looks = iter([((1, 64, 1),), ((1, 64, 2),), ((1, 64, 2),)])
    monkeypatch.setattr(api_keys, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(api_keys, "_signature", lambda file: next(looks, ((1, 64, 2),)))

    def load() -> ApiKeys:
        raise OSError("a secret")

    following = asyncio.create_task(keys.follow(tmp_path / "keys", load))
    await settle(20)
    assert not following.done()
    following.cancel()
    assert caplog.messages == ["the keys stay as they are: OSError"]


def test_keys_that_a_plugin_knows(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"of the file").hexdigest()
    file.write_text(f'[[tenant]]\nname = "ada"\nkey_sha256 = ["{digest}"]\nlimits = {{ live_outputs = 3 }}\n')
    asked: list[str] = []

    def find(key: str) -> str | None:
        asked.append(key)
        return {"one": "team", "two": "ada"}.get(key)

    keys = ApiKeys.load([], file, SALTS, PluggedKeys("acme:find", find, SALTS))
    assert keys.required
    assert keys.are_shared
    team, ada, of_file = (keys.authorize(f"Bearer {key}".encode()) for key in ("one", "two", "of the file"))
    assert asked == ["one", "two"], "keys of the file are not asked for"
    assert (team.name, team.limits.live_outputs) == ("team", None)
    assert (ada.name, ada.cache_salt, ada.limits.live_outputs) == ("ada", of_file.cache_salt, 3)
    assert len({team.key, ada.key, of_file.key}) == 3
    assert team.cache_salt not in (b"", ada.cache_salt)
    assert keys.tenant("team") is not None
    for wrong in (b"Bearer three", b"Bearer \xff", b"", None):
        with pytest.raises(errors.Unauthenticated):
            keys.authorize(wrong)
    assert ApiKeys.load([], None, SALTS, PluggedKeys("acme:find", find, SALTS)).required


@pytest.mark.parametrize("answer", [7, "", "a b", "x" * 65, "key:1"])
def test_a_plugin_that_fails_is_no_fault_of_the_client(answer: object) -> None:
    keys = ApiKeys.load([], None, SALTS, PluggedKeys("acme:find", lambda key: answer, SALTS))  # type: ignore[arg-type, return-value]
    with pytest.raises(errors.Unavailable, match="API keys cannot be checked now"):
        keys.authorize(b"Bearer x")


@pytest.mark.parametrize("raised", [KeyError, UnicodeDecodeError])
def test_an_error_of_a_plugin_leaves_no_key_in_the_log(
    raised: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def find(key: str) -> str:
        if raised is UnicodeDecodeError:
            return b"\xff".decode()
        return dict[str, str]()[key]

    keys = ApiKeys.load([], None, SALTS, PluggedKeys("acme:find", find, SALTS))
    with pytest.raises(errors.Unavailable, match="API keys cannot be checked now"):
        keys.authorize(b"Bearer s3cret")
    assert f"the plugin acme:find failed: {raised.__name__} in {__file__}, line " in caplog.text
    assert "s3cret" not in caplog.text
