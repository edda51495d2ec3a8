"""How long clients ask the cache to keep their prompts, in OpenAI's API and over gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.gateway.fakes import BLOCK_SIZE, MODEL, FakeMesh
from tests.services.gateway.responses.response_clients import openai_client
from tokenloom.client import AsyncClient
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.records.cache_marks import openai_seconds

Both = tuple[FakeMesh, openai.AsyncOpenAI]
MARK = {"mode": "explicit"}
TEXT = "x" * 3 * BLOCK_SIZE


@pytest.fixture
async def both(socket_dir: Path) -> AsyncIterator[Both]:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = ["Hello"]
        yield mesh, client


def kept(mesh: FakeMesh) -> tuple[int, int]:
    """For how many seconds the only prompt since the last call is to be kept, and its tokens in whole blocks."""
    (submit,) = [each.submit for session in mesh.outputs.sessions for each in session.requests.values()]
    for session in mesh.outputs.sessions:
        session.requests.clear()
    return submit.keep_seconds, len(submit.prompt.token_ids) // BLOCK_SIZE * BLOCK_SIZE


CASES = [
    (None, None, 0),
    ({}, None, 1800),
    ({"ttl": "12h"}, None, 43_200),
    (None, MARK, 1800),
    ({"ttl": "12h"}, MARK, 43_200),
    ({"mode": "explicit"}, None, 0),
    ({"mode": "explicit", "ttl": "12h"}, {**MARK, "ttl": "30m"}, 1800),
    ({"mode": "explicit"}, {**MARK, "ttl": "12h"}, 43_200),
]


@pytest.mark.parametrize(("options", "mark", "seconds"), CASES)
async def test_options_and_breakpoints_of_chats_and_responses(
    both: Both, options: dict[str, Any] | None, mark: dict[str, Any] | None, seconds: int
) -> None:
    mesh, client = both
    more: Any = {} if options is None else {"prompt_cache_options": options}
    marked: Any = {"text": TEXT} | ({} if mark is None else {"prompt_cache_breakpoint": mark})
    messages: Any = [{"role": "user", "content": [{"type": "text", **marked}]}]
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **more)
    assert "x-tokenloom-ignored" not in raw.headers
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    asked, in_blocks = kept(mesh)
    assert (asked, usage.prompt_tokens_details.cache_write_tokens) == (seconds, in_blocks - 1 if seconds else None)
    items: Any = [{"role": "user", "content": [{"type": "input_text", **marked}]}]
    response = await client.responses.create(model=MODEL, input=items, **more)
    asked, in_blocks = kept(mesh)
    assert response.usage is not None
    written = response.usage.input_tokens_details.cache_write_tokens
    assert (asked, written) == (seconds, in_blocks - 1 if seconds else 0)
    assert (response.prompt_cache_options is None) == (options is None)
    if response.prompt_cache_options is not None:
        assert response.prompt_cache_options.mode == (options or {}).get("mode", "implicit")


@pytest.mark.parametrize(
    ("options", "mark", "named"),
    [
        ({"ttl": "5m"}, None, "prompt_cache_options.ttl"),
        ({"ttl": "5m"}, MARK, "prompt_cache_options.ttl"),
        ({"mode": "none"}, None, "prompt_cache_options.mode"),
        (None, {"mode": "implicit"}, "input[0].content[1].prompt_cache_breakpoint"),
        (None, "explicit", "input[0].content[1].prompt_cache_breakpoint"),
        (None, {**MARK, "ttl": 30}, "input[0].content[1].prompt_cache_breakpoint.ttl"),
    ],
)
def test_what_is_malformed_is_refused_by_name(options: dict[str, Any] | None, mark: Any, named: str) -> None:
    part = {} if mark is None else {"prompt_cache_breakpoint": mark}
    with pytest.raises(InvalidArgument) as raised:
        openai_seconds(options, [("input[0].content", [{}, part, "text"])])
    assert raised.value.field == named


async def test_a_response_says_why_the_compared_one_was_not_found_in_the_cache(both: Both) -> None:
    _, client = both

    async def compared(response_id: str, **fields: Any) -> Any:
        options: Any = {"comparison_response_id": response_id}
        body: Any = {"input": TEXT, "instructions": "Be brief."} | fields
        response = await client.responses.create(model=MODEL, prompt_cache_options=options, **body)
        found = response.prompt_cache_diagnostics
        assert found is not None
        return found

    first = await client.responses.create(
        model=MODEL, input=TEXT, instructions="Be brief.", prompt_cache_options={"ttl": "30m"}
    )
    assert first.prompt_cache_diagnostics is None
    changed = await compared(first.id, input="y" + TEXT)
    assert (changed.type, changed.reason) == ("cache_miss", "input_changed")
    assert changed.cache_missed_tokens > 0
    assert (await compared(first.id)).type == "cache_hit"
    assert (await compared("resp_none")).type == "comparison_response_not_found"
    with pytest.raises(openai.BadRequestError) as raised:
        await compared(3)  # type: ignore[arg-type]
    assert raised.value.param == "prompt_cache_options.comparison_response_id"


async def test_a_client_of_grpc_names_its_session_and_keeps_its_prompt(mesh: FakeMesh) -> None:
    mesh.outputs.auto = ["x"]
    async with mesh.http() as http, AsyncClient(mesh.grpc_address) as client:
        body = {"messages": [{"role": "user", "content": TEXT}], "prompt_cache_key": "one"}
        await http.post("/v1/chat/completions", json=body)
        (submit,) = [each.submit for session in mesh.outputs.sessions for each in session.requests.values()]
        kept(mesh)
        answer = await client.chat([{"role": "user", "content": TEXT}], session="one", keep_seconds=300)
        (same,) = [each.submit for session in mesh.outputs.sessions for each in session.requests.values()]
        asked, in_blocks = kept(mesh)
        assert (same.session, asked) == (submit.session, 300)
        assert answer.usage.cache_write_tokens == in_blocks - 1
        async with client.session() as session:
            turns = []
            for _ in range(2):
                await session.generate("ab", max_tokens=2)
                turns += [each.submit.session for held in mesh.outputs.sessions for each in held.requests.values()]
                kept(mesh)
        assert turns[0] == turns[1] != 0
