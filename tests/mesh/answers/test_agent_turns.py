"""Turns of coding agents through the whole mesh: what they find in the cache, and why they miss the rest."""

from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.agent_bodies import CLAUDE_CODE, claude_body, tool_result
from tests.mesh.harness import MODEL, Mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engine": {"max_model_len": 2048, "num_kv_blocks": 2048}}


async def claude_turns(http: httpx.AsyncClient, number: int, **fields: Any) -> list[dict[str, Any]]:
    """The usage of each turn of a session of Claude Code's."""
    turns: list[dict[str, Any]] = []
    usages = []
    for turn in range(number):
        body = claude_body(MODEL, turns, turn, **fields)
        response = await http.post("/v1/messages?beta=true", json=body, headers=CLAUDE_CODE)
        answer = response.json()
        assert response.status_code == 200, answer
        usages.append(answer["usage"] | {"volatile": response.headers.get("x-tokenloom-volatile")})
        turns += tool_result(answer, f"step {turn}")
    return usages


async def test_the_third_turn_finds_the_conversation(http: httpx.AsyncClient) -> None:
    usages = await claude_turns(http, 3, max_tokens=12)
    for before, usage in pairwise(usages):
        assert usage["volatile"] == "claude-code.billing"
        previous = before["input_tokens"] + before["cache_read_input_tokens"]
        assert usage["cache_read_input_tokens"] >= 0.95 * previous, usages


async def test_a_changing_line_loses_it(mesh_dir: Any, mesh_options: dict[str, Any]) -> None:
    folder = mesh_dir / "kept"
    folder.mkdir()
    kept = Mesh(folder, **mesh_options, gateway={"volatile_lines": "keep"})
    async with kept.running(), kept.http() as http:
        usages = await claude_turns(http, 3, max_tokens=12)
    assert [usage["volatile"] for usage in usages] == [None] * 3
    assert max(usage["cache_read_input_tokens"] for usage in usages) <= 64, usages
