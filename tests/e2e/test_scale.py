"""``tokenloom scale`` against meshes of processes while clients ask: no request is lost, and none gets other tokens."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import COMMAND
from tests.e2e.test_restart import TIMEOUT, Load, options

CLIENTS = 6
MESHES = {
    "hash": (("--worker", "hash"), {"TOKENLOOM_HASH_STEP_SECONDS": "0.002"}, 100),
    # In float32: the tokens of bfloat16 depend on how many requests a step computes.
    "model": (("--num-kv-blocks", "200", "--dtype", "float32"), {}, 24),
}


@pytest.fixture(params=sorted(MESHES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def scale(mesh: Any, *arguments: str) -> str:
    """Run the command while the event loop asks; its output."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "scale",
        *arguments,
        env=mesh.environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + mesh.log.read_text()
    return output.decode()


def engines(mesh: Any) -> list[str]:
    return [f"engine-{part['index']}" for part in mesh.ps() if part["service"] == "engine"]


async def test_a_group_of_processes_grows_and_shrinks_under_load(serve: Any, kind: str) -> None:
    flags, environment, tokens = MESHES[kind]
    mesh = serve(*flags, "--data-parallel-size", "2", **environment)
    async with asyncio.timeout(300), httpx.AsyncClient(timeout=TIMEOUT) as http:

        async def text(number: int, rank: int | None = None) -> str:
            headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
            body = options(prompt=list(range(100 + 40 * number, 120 + 40 * number)), max_tokens=tokens)
            response = await http.post(f"{mesh.url}/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            assert response.json()["usage"]["completion_tokens"] == tokens
            return str(choice["text"])

        expected = [await text(number) for number in range(CLIENTS)]
        assert len(set(expected)) > 1

        def client(number: int) -> Any:
            async def ask() -> None:
                assert await text(number) == expected[number]

            return ask

        load = Load()
        async with load.running([client(number) for number in range(CLIENTS)]):
            for had, size in ((2, 4), (4, 1), (1, 3)):
                await load.answers(CLIENTS)
                changed = [f"engine-{index}" for index in range(min(had, size), max(had, size))]
                done = f"{'started' if size > had else 'stopped, without requests'}: {', '.join(changed)}"
                printed = await scale(mesh, "data-parallel", str(size))
                assert f"data-parallel group data-parallel: {had} → {size} rank" in printed
                assert done in printed
                assert engines(mesh) == [f"engine-{index}" for index in range(size)]
                # The last rank computes, so a group that has grown has more than names.
                assert await text(0, rank=size - 1) == expected[0]
                await load.answers(CLIENTS)
        assert load.failures == []
