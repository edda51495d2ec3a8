"""Ends the connection between a client that resumes and a gateway that lives: the client gets every token once."""

import asyncio
from pathlib import Path

from tests.mesh.harness import MODEL, SOON, Mesh
from tokenloom.bench.chaos.faults.proxy import Proxy
from tokenloom.client import AsyncClient, Chunk

TOKENS = 100


async def read(client: AsyncClient, begun: asyncio.Event) -> list[Chunk]:
    chunks = []
    stream = await client.stream("Once", model=MODEL, max_tokens=TOKENS, ignore_eos=True, seed=3, temperature=1.0)
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 5:
            begun.set()
    return chunks


def _tokens(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def test_a_stream_continues_and_an_abandoned_one_is_cancelled(socket_dir: Path) -> None:
    engine = {"hash_step_seconds": 0.02}
    async with Mesh(socket_dir, engine=engine).running() as mesh, asyncio.timeout(SOON):
        address = mesh.gateway.settings.listen
        proxy = Proxy(lambda: asyncio.open_unix_connection(address.removeprefix("unix:")))
        path = f"{socket_dir}/proxy"
        await proxy.listen_unix(path)
        async with AsyncClient(address) as direct, AsyncClient(f"unix:{path}") as client:
            begun = asyncio.Event()
            reading = asyncio.create_task(read(client, begun))
            await begun.wait()
            assert proxy.reset() == 1
            whole, expected = await asyncio.gather(reading, read(direct, asyncio.Event()))
            assert "".join(each.text for each in whole) == "".join(each.text for each in expected)
            assert _tokens(whole) == _tokens(expected)
            assert len(_tokens(whole)) == TOKENS
            abandoned = await client.stream("Once", model=MODEL, max_tokens=TOKENS, ignore_eos=True)
            await mesh.until_running()
            abandoned.close()
            await mesh.until_idle()
        await proxy.close()
