"""The measurement of real agents, with requests as they send them in place of the agents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent_bodies import CLAUDE_CODE, claude_body, tool_result
from tests.clients.agent_turns import ScriptedMesh, failures
from tests.clients.agents import AGENTS
from tests.clients.relay import Exchange, relaying, usage_of
from tests.mesh.harness import MODEL
from tests.plain_text import PLAIN_TEXT

CLAUDE, AIDER = AGENTS[0], AGENTS[-2]


def exchange(prompt: int, cached: int, **miss: Any) -> Exchange:
    details = {"cached_tokens": cached, **({"cache_miss": miss} if miss else {})}
    return Exchange("/", "", {}, 200, {"prompt_tokens": prompt, "prompt_tokens_details": details}, "")


def test_usage_is_that_of_each_api() -> None:
    chat = '{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}'
    responses = '"usage":null}\n\ndata: {"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}}'
    messages = '{"usage":{"input_tokens":5,"cache_read_input_tokens":4}}\n\ndata: {"usage":{"output_tokens":2}}'
    for answer in (chat, responses, messages):
        found = replace(exchange(0, 0), usage=usage_of(answer))
        assert (found.prompt_tokens, found.cached_tokens) == (9, 4)


def test_a_turn_that_loses_the_cache_fails() -> None:
    good = [exchange(100 * turn, 100 * turn - 100) for turn in range(1, 7)]
    assert failures(CLAUDE, good) == []
    assert len(failures(CLAUDE, good[:4])) == 1, "too few turns"
    assert len(failures(CLAUDE, [*good, exchange(700, 500)])) == 1
    changed = exchange(700, 496, cause="message_changed", token=500)
    assert len(failures(CLAUDE, [*good, changed])) == 1
    assert failures(AIDER, [*good, changed]) == [], "aider changes the end of its prompt itself"
    assert len(failures(AIDER, [*good, exchange(700, 400, cause="message_changed", token=500)])) == 1


@pytest.mark.parametrize("lines", ["move", "keep"])
async def test_scripted_turns_are_found_without_the_changing_line(socket_dir: Path, lines: str) -> None:
    calls = [{"command": f'echo "{turn}" é\n', "description": "Say it"} for turn in range(5)]
    agent = replace(CLAUDE, calls=lambda folder: [("Bash", call) for call in calls])
    mesh = ScriptedMesh(socket_dir, agent.script(socket_dir), {"volatile_lines": lines})
    turns: list[Any] = []
    async with mesh.running(), relaying(mesh.url) as (relay, url), mesh.http(base_url=url, verify=PLAIN_TEXT) as http:
        for turn, call in enumerate(calls):
            body = claude_body(MODEL, turns, turn)
            answer = (await http.post("/v1/messages?beta=true", json=body, headers=CLAUDE_CODE)).json()
            assert [block["input"] for block in answer["content"] if block["type"] == "tool_use"] == [call]
            turns += tool_result(answer, f"step {turn}")
    assert [agent.is_turn(each.body) for each in relay.exchanges] == [True] * len(calls)
    causes = [each.miss.get("cause") for each in relay.exchanges[1:]]
    assert causes == [None if lines == "move" else "volatile_line"] * len(causes)
    assert len(failures(agent, relay.exchanges)) == (0 if lines == "move" else len(causes))
