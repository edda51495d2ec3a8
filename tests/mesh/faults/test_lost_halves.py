"""Parts are lost while the second half of a request runs, whose first half a peer has asked for before."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.split import SplitMesh
from tests.mesh.test_mutual_tls import HOLD, PROMPT, certificates, generate, peer_of

__all__ = ["certificates"]
LENGTH = 40
ENGINE = {"kv_transports": ("socket",), "kv_socket_listen": "127.0.0.1:0", "hash_step_seconds": 0.02}


@asynccontextmanager
async def halves(
    socket_dir: Path, certificates: Path, *, decode: int = 2
) -> AsyncIterator[tuple[SplitMesh, httpx.AsyncClient, dict[str, Any]]]:
    """A mesh, a peer, and the body of the second half of a request."""
    roles, gateway = ("prefill", *("decode",) * decode), {"internal_listen": "127.0.0.1:0"}
    mesh = SplitMesh(socket_dir, roles, engine=ENGINE, gateway=gateway, certificates=certificates)
    async with mesh.running(), peer_of(certificates, mesh) as peer:
        params = (await generate(peer, HOLD))["kv_transfer_params"]
        sampling = {"max_tokens": LENGTH, "ignore_eos": True}
        yield (
            mesh,
            peer,
            {"token_ids": PROMPT, "sampling_params": sampling, "kv_transfer_params": params, "stream": True},
        )


async def tokens_of(peer: httpx.AsyncClient, body: dict[str, Any], came: asyncio.Event) -> list[int]:
    """The tokens of a stream; ``came`` is set with the fifth."""
    tokens: list[int] = []
    async with peer.stream("POST", "/inference/v1/generate", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
                if len(tokens) >= 5:
                    came.set()
    return tokens


async def test_the_engine_that_decodes_is_killed(socket_dir: Path, certificates: Path) -> None:
    async with halves(socket_dir, certificates) as (mesh, peer, body):
        came = asyncio.Event()
        call = asyncio.create_task(tokens_of(peer, body, came))
        await came.wait()
        (engine,) = [each for each in mesh.engines if each.role == "decode" and each.core.scheduler.requests]
        assert engine.stats.kv_blocks_received > 0, "it has read the KV"
        await engine.kill()
        assert await call == mesh.expected(PROMPT, LENGTH)
        await mesh.check_nothing_is_left()


async def test_the_engine_that_holds_the_kv_is_killed_before_it_is_read(socket_dir: Path, certificates: Path) -> None:
    async with halves(socket_dir, certificates, decode=1) as (mesh, peer, body):
        await mesh.of_role("prefill").kill()
        answer = await peer.post("/inference/v1/generate", json=body | {"stream": False})
        if answer.status_code == 200:  # the coordinator may know of its end already, or not yet
            assert answer.json()["choices"][0]["token_ids"] == mesh.expected(PROMPT, LENGTH)
        else:
            assert answer.status_code == 400, answer.text
            assert "the registry has no engine" in answer.json()["error"]["message"]


async def test_the_output_processor_is_killed(socket_dir: Path, certificates: Path) -> None:
    async with halves(socket_dir, certificates) as (mesh, peer, body):
        came = asyncio.Event()
        call = asyncio.create_task(tokens_of(peer, body, came))
        await came.wait()
        await mesh.output_processors[0].kill()
        await mesh.output_processors[0].start()
        assert await call == mesh.expected(PROMPT, LENGTH)


async def test_a_peer_that_leaves_holds_nothing(socket_dir: Path, certificates: Path) -> None:
    async with halves(socket_dir, certificates) as (mesh, peer, body):
        came = asyncio.Event()
        call = asyncio.create_task(tokens_of(peer, body, came))
        await came.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await mesh.check_nothing_is_left()
