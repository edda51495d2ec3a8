"""Turns of coding agents through the whole mesh: what they find in the cache, and why they miss the rest."""

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.agent_bodies import BASH, CLAUDE_CODE, claude_body, rules, tool_result
from tests.mesh.asking import ask
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


def num_prompt(usage: dict[str, Any]) -> int:
    return sum(usage[f"{part}input_tokens"] for part in ("", "cache_read_", "cache_creation_"))


async def test_the_third_turn_finds_the_conversation(http: httpx.AsyncClient) -> None:
    usages = await claude_turns(http, 3, max_tokens=12)
    for before, usage in pairwise(usages):
        assert usage["volatile"] == "claude-code.billing"
        assert usage["cache_read_input_tokens"] >= 0.95 * num_prompt(before), usages
        in_blocks = num_prompt(usage) // 16 * 16
        assert usage["cache_creation_input_tokens"] == in_blocks - usage["cache_read_input_tokens"] > 0


async def test_a_changing_line_loses_it(mesh_dir: Any, mesh_options: dict[str, Any]) -> None:
    folder = mesh_dir / "kept"
    folder.mkdir()
    kept = Mesh(folder, **mesh_options, gateway={"volatile_lines": "keep"})
    async with kept.running(), kept.http() as http:
        usages = await claude_turns(http, 3, max_tokens=12)
    assert [usage["volatile"] for usage in usages] == [None] * 3
    assert max(usage["cache_read_input_tokens"] for usage in usages) <= 64, usages


async def chat(http: httpx.AsyncClient, messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, "tools": [TOOL], **fields}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def miss_of(answer: dict[str, Any]) -> dict[str, Any]:
    miss: dict[str, Any] = answer["usage"]["prompt_tokens_details"].get("cache_miss", {})
    return miss


TOOL = {"type": "function", "function": {"name": "Bash", "parameters": BASH["input_schema"]}}


def conversation(name: str) -> list[dict[str, Any]]:
    """One that no other test has."""
    return [{"role": "system", "content": f"{name}\n{rules(10)}"}, {"role": "user", "content": "Begin."}]


def continued(messages: list[dict[str, Any]], answer: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    message = answer["choices"][0]["message"]
    return [*messages, {**message, **changes}, {"role": "user", "content": "Go on."}]


async def test_a_first_turn_is_new_and_the_next_one_misses_nothing(http: httpx.AsyncClient) -> None:
    first = await chat(http, conversation("first"))
    miss = miss_of(first)
    assert (miss["cause"], miss["missed_tokens"]) == ("new_prefix", first["usage"]["prompt_tokens"])
    second = await chat(http, continued(conversation("first"), first))
    # The hash worker's tokens are seldom those of a tokenizer, so the answer may be in other ones.
    assert miss_of(second).get("cause") in (None, "retokenised"), second["usage"]


async def test_what_the_client_changes_is_named(http: httpx.AsyncClient) -> None:
    messages = conversation("changes")
    messages = continued(messages, await chat(http, messages))
    answer = await chat(http, messages)
    edited = [messages[0], {"role": "user", "content": "Begin again."}, *messages[2:]]
    other = {"type": "function", "function": {"name": "Read"}}
    for expected, body, fields in (
        ("message_changed", edited, {}),
        ("tools_changed", messages, {"tools": [TOOL, other]}),
        ("salt_changed", messages, {"cache_salt": "another"}),
    ):
        miss = miss_of(await chat(http, body, **fields))
        assert miss["cause"] == expected
        assert 0 < miss["missed_tokens"] <= answer["usage"]["prompt_tokens"]


async def test_evicted_blocks_are_named_in_usage_timeline_and_metrics(mesh: Mesh, http: httpx.AsyncClient) -> None:
    messages = conversation("evicted")
    first = await chat(http, messages)
    for index in range(18):  # of 2,000 tokens each, for a cache of 32,768
        await ask(http, [index + 5] * 2000, 1)
    body = {"messages": continued(messages, first), "return_timeline": True, "stream": True}
    body |= {"model": MODEL, "max_tokens": 4, "tools": [TOOL], "stream_options": {"include_usage": True}}
    lines = (await http.post("/v1/chat/completions", json=body)).text.splitlines()
    (event,) = [json.loads(line[6:]) for line in lines if '"usage":{' in line]
    miss = miss_of(event)
    assert (miss["cause"], miss["token"]) == ("evicted", 0)
    assert event["timeline"]["cache_miss"] == miss
    metrics = (await http.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if "missed_tokens_total" in line and 'cause="evicted"' in line]
    assert float(line.split()[1]) == miss["missed_tokens"]


async def test_ids_are_replayed_on_request(mesh_dir: Any, mesh_options: dict[str, Any]) -> None:
    folder = mesh_dir / "replayed"
    folder.mkdir()
    replayed = Mesh(folder, **mesh_options, gateway={"replay_ids": True})
    async with replayed.running(), replayed.http() as http:
        messages: list[dict[str, Any]] = conversation("replayed")
        before: list[int] = []
        for _ in range(4):
            answer = await chat(http, messages, return_token_ids=True)
            prompt = answer["prompt_token_ids"]
            assert prompt[: len(before)] == before
            assert miss_of(answer).get("cause") == (None if before else "new_prefix")
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= (len(before) - 1) // 16 * 16
            before = prompt + answer["choices"][0]["token_ids"]
            messages = continued(messages, answer)
