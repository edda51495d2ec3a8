"""Lines of system prompts that clients change: taken out or moved, and nothing else is touched."""

import copy
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.services.gateway.records.volatile_lines import (
    AGENTS,
    OF_MESSAGES,
    VOLATILE_LINES,
    lines_of,
    settled,
)

BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
DATE = "  Today's date: Sun Nov 29 2026"
CLAUDE, OPENCODE = "claude-cli/2.1.330 (external, cli)", "opencode/1.4.2 ai-sdk/provider-utils/4.0.1"


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (f"{BILLING}\nBe brief.", "Be brief."),
        ([block(BILLING), block("Be brief.")], [block("Be brief.")]),
        ([block(f"{BILLING}\nBe brief."), block("x")], [block("Be brief."), block("x")]),
        ([block(BILLING)], []),
        (BILLING, ""),
    ],
)
def test_the_billing_line_is_taken_out(system: Any, expected: Any) -> None:
    body = {"system": system, "messages": [{"role": "user", "content": BILLING}]}
    before = copy.deepcopy(body)
    assert settled(body, OF_MESSAGES) == ({**body, "system": expected}, ("claude-code.billing",))
    assert body == before


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_date_moves_to_the_end_of_the_system_prompt(field: str, role: str) -> None:
    text = f"<env>\n  Directory: /x\n{DATE}\n</env>\n"
    question = {"role": "user", "content": f"What is it?\n{DATE}"}
    body = {field: [{"role": role, "content": text}, {"role": role, "content": [block("Rules.\n")]}, question]}
    moved, names = settled(body, lines_of(OPENCODE.encode()))
    assert names == ("environment.date",)
    assert moved[field] == [
        {"role": role, "content": "<env>\n  Directory: /x\n</env>\n"},
        {"role": role, "content": [block(f"Rules.\n{DATE.strip()}")]},
        question,
    ]


def test_instructions_are_a_system_prompt() -> None:
    body = {"instructions": f"{DATE}\nBe brief.", "input": DATE}
    assert settled(body, lines_of(CLAUDE.encode()))[0] == {
        "instructions": f"Be brief.\n{DATE.strip()}",
        "input": DATE,
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"system": None, "messages": None},
        {"system": [], "messages": [], "input": 3},
        {"system": 7, "messages": {"role": "system", "content": BILLING}},
        {"system": ["x", 3, None, {"text": 4}, {"content": None}], "messages": ["x", {"role": "system"}]},
        {"messages": [{"role": "user", "content": BILLING}]},
        {"system": f"Say {BILLING} and nothing else."},
        {"system": [block(f"Our proxy takes this line out:\n{BILLING}\nExplain why.")]},
    ],
)
def test_other_bodies_stay_as_they_are(body: Any) -> None:
    assert settled(body, VOLATILE_LINES) == (body, ())


def test_an_empty_part_that_was_there_stays() -> None:
    body = {"system": [block(BILLING), block(""), {"type": "image"}, block("x")]}
    assert settled(body, OF_MESSAGES)[0] == {"system": [block(""), {"type": "image"}, block("x")]}


def test_which_lines_a_client_has() -> None:
    assert lines_of(b"claude-cli/2.1") == VOLATILE_LINES
    assert lines_of(b"OpenAI/Python 3.57") == ()
    assert lines_of(b"OpenAI/Python 3.57", OF_MESSAGES) == OF_MESSAGES
    assert set(AGENTS) == {b"claude-cli/", b"opencode/"}


SYSTEM = f"{BILLING}\nBe brief."
QUESTION = {"role": "user", "content": "hi"}


async def system_prompt(mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: Any, agent: str) -> tuple[str, str]:
    """What the template is given, and the header of the response."""
    mesh.outputs.auto = ["ok"]
    for tokenizer in (mesh.tokenizer, mesh.second_tokenizer):
        tokenizer.chats.clear()
    response = await http.post(path, json=body, headers={"user-agent": agent})
    assert response.status_code == 200, response.text
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    return chat.messages_json.decode(), response.headers.get("x-tokenloom-volatile", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_no_billing_line_from_any_client(
    mesh: FakeMesh, http: httpx.AsyncClient, stream: bool
) -> None:
    body = {"model": MODEL, "max_tokens": 4, "system": SYSTEM, "messages": [QUESTION], "stream": stream}
    text, header = await system_prompt(mesh, http, "/v1/messages?beta=true", body, "litellm/1.0")
    assert (BILLING in text, header) == (False, "claude-code.billing")


async def test_elsewhere_the_client_must_be_named(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    for path, body in (
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "system", "content": SYSTEM}, QUESTION]}),
        ("/v1/responses", {"model": MODEL, "instructions": SYSTEM, "input": "hi"}),
    ):
        text, header = await system_prompt(mesh, http, path, body, "OpenAI/Python 3.57.0")
        assert (BILLING in text, header) == (True, "")
        text, header = await system_prompt(mesh, http, path, body, CLAUDE)
        assert (BILLING in text, header) == (False, "claude-code.billing")


async def test_counted_tokens_are_those_of_the_message(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    plain = {"model": MODEL, "system": "Be brief.", "messages": [QUESTION]}
    counts = [
        (await http.post("/v1/messages/count_tokens", json=body, headers={"user-agent": CLAUDE})).json()
        for body in (plain, plain | {"system": SYSTEM})
    ]
    assert counts[0] == counts[1]


async def test_prompts_may_be_kept(socket_dir: Any) -> None:
    async with FakeMesh(socket_dir).gateway(volatile_lines="keep") as mesh, mesh.http() as http:
        body = {"model": MODEL, "max_tokens": 4, "system": BILLING, "messages": [QUESTION]}
        text, header = await system_prompt(mesh, http, "/v1/messages", body, CLAUDE)
    assert (BILLING in text, header) == (True, "")


def test_the_documentation_has_the_table() -> None:
    page = Path("docs/use/coding-agent.md").read_text()
    for line in VOLATILE_LINES:
        fate = "moved" if line.moves else "taken out"
        assert f"| `{line.name}` | {line.client} | {line.why} | {fate} |\n" in page
