"""Two keys, one prompt: no road shows the second tenant what the first one has sent; joined tenants share."""

import hashlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.mesh.harness import Mesh
from tests.mesh.split import SplitMesh
from tests.mesh.tenants.roads import LOADED, ROADS, Client, Road, counted, token_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = ("sk-a", "sk-b")


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"gateway": {"api_key": KEYS}, "engine": {"enable_prompt_embeds": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split() -> AsyncIterator[SplitMesh]:
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        mesh = SplitMesh(Path(directory), engine={"enable_prompt_embeds": True}, gateway={"api_key": KEYS})
        async with mesh.running():
            yield mesh


@pytest.mark.parametrize("road", ROADS)
async def test_another_tenants_prompt_is_not_cached(mesh: Mesh, road: Road) -> None:
    await check_isolated(mesh, road)


@pytest.mark.parametrize("road", ROADS)
async def test_nor_with_prefill_and_decode_on_different_engines(split: SplitMesh, road: Road) -> None:
    await check_isolated(split, road)


async def check_isolated(mesh: Mesh, road: Road) -> None:
    first, second = (Client(mesh, key) for key in KEYS)
    seed = ROADS.index(road) + 1
    assert await road(first, seed) == 0
    assert await road(first, seed) > 0, "a tenant does not find its own prompt"
    assert await road(second, seed) == 0
    assert await road(second, seed) > 0


async def test_roads_share_one_tenants_cache_only(mesh: Mesh) -> None:
    """What one tenant has sent over HTTP is found over gRPC and KServe by the same tenant, by no other."""
    first, second = (Client(mesh, key) for key in KEYS)
    await ROADS[0](first, 100)
    by_name = {road.__name__: road for road in ROADS}
    for name in ("grpc_text", "kserve", "echo"):
        assert await by_name[name](first, 100) > 0
    assert await by_name["grpc_text"](second, 100) == 0


@pytest.mark.parametrize("tier", ["offload", "store"])
async def test_evicted_blocks_come_back_to_their_tenant_only(tmp_path: Path, socket_dir: Path, tier: str) -> None:
    """A tier keeps a tenant's blocks under the hashes that its salt made."""
    engine: dict[str, Any] = {"kv_offload_path": str(tmp_path), "kv_offload_bytes": 64 << 20}
    if tier == "store":
        engine = {"kv_store": tmp_path.as_uri(), "kv_store_bytes": 64 << 20}
    engine["num_kv_blocks"] = 20
    async with Mesh(socket_dir, gateway={"api_key": KEYS}, engine=engine).running() as mesh:
        first, second = (Client(mesh, key) for key in KEYS)
        assert await token_ids(first, 1) == 0
        for seed in range(2, 8):  # each takes seven of the twenty blocks
            await token_ids(first, seed)
        assert await token_ids(second, 1) == 0
        assert counted(mesh, LOADED) == 0
        assert await token_ids(first, 1) > 0
        assert counted(mesh, LOADED) > 0, "the prompt was not evicted"


KEY_FILE = """
[[tenant]]
name = "search"
key_sha256 = ["{one}", "{two}"]

[[tenant]]
name = "archive"
key_sha256 = ["{three}"]
cache = "search"

[[tenant]]
name = "stranger"
key_sha256 = ["{four}"]
"""


async def test_tenants_that_are_joined_share(tmp_path: Path, socket_dir: Path) -> None:
    """Two keys of one tenant share, and two tenants of one cache; a tenant that names neither does not."""
    names = ("one", "two", "three", "four")
    file = tmp_path / "tenants.toml"
    file.write_text(KEY_FILE.format(**{name: hashlib.sha256(name.encode()).hexdigest() for name in names}))
    async with Mesh(socket_dir, gateway={"api_key_file": file}).running() as mesh:
        one, two, three, four = (Client(mesh, name) for name in names)
        assert await token_ids(one, 1) == 0
        assert await token_ids(two, 1) > 0
        assert await token_ids(three, 1) > 0
        assert await token_ids(four, 1) == 0


async def test_gateways_with_one_secret_share_a_tenants_cache(tmp_path: Path, socket_dir: Path) -> None:
    """A gateway that was replaced finds what its predecessor computed, unless its secret is another one."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of the whole mesh\n")
    gateway = {"api_key": KEYS, "cache_salt_secret_file": secret}
    async with Mesh(socket_dir, gateway=gateway).running() as mesh:
        assert await token_ids(Client(mesh, KEYS[0]), 1) == 0
        await mesh.gateway.stop()
        await mesh.gateway.start()
        assert await token_ids(Client(mesh, KEYS[0]), 1) > 0
        await mesh.gateway.stop()
        secret.write_text("another secret of the mesh")
        await mesh.gateway.start()
        assert await token_ids(Client(mesh, KEYS[0]), 1) == 0


async def test_without_keys_all_clients_share(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh:
        assert await token_ids(Client(mesh, "sk-any"), 1) == 0
        assert await token_ids(Client(mesh, "sk-other"), 1) > 0
