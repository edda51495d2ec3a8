"""The ids of long prompts travel as bytes through all five services, and give the answers that lists give."""

from typing import Any

import httpx
import pytest

from tests.mesh.harness import MODEL, Mesh
from tokenloom.request import packed_ids
from tokenloom.services.engine.records import core_request
from tokenloom.services.engine.streams import connect_stream

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = list(range(10, 90))
TEXT = "The river ran past the mill, and nobody in the village had ever asked where it went."
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ids": ("/v1/completions", {"prompt": IDS}),
    "several": ("/v1/completions", {"prompt": [IDS, IDS[1:]]}),
    "text": ("/v1/completions", {"prompt": TEXT}),
    "end": ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 20}),
    "samples": ("/v1/completions", {"prompt": IDS, "n": 2, "seed": 3, "temperature": 1.0}),
    "echo": ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 1}),
    "beams": ("/v1/completions", {"prompt": IDS, "n": 2, "use_beam_search": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "turns": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
}


async def answer(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Return what an answer says beside its name and its time."""
    path, body = BODIES[name]
    wanted = {"model": MODEL, "max_tokens": 5, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    response = await http.post(path, json=wanted | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return {key: found[key] for key in ("choices", "prompt_token_ids", "usage") if key in found}


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The packed ids of each request that reaches the engine."""
    found: list[bytes] = []

    def note(add: Any, *rest: Any) -> Any:
        found.append(add.prompt.packed_token_ids)
        return core_request.to_core_request(add, *rest)

    monkeypatch.setattr(connect_stream, "to_core_request", note)
    return found


def without_cache(found: dict[str, Any]) -> dict[str, Any]:
    """What was in the cache depends on the requests before."""
    return found | {"usage": {key: value for key, value in found["usage"].items() if "details" not in key}}


@pytest.mark.parametrize("name", BODIES)
async def test_packed_ids_give_the_same_answer(
    mesh: Mesh, http: httpx.AsyncClient, arrived: list[bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    listed = await answer(http, name)
    assert not any(arrived)
    num_listed = len(arrived)
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 8)
    assert without_cache(await answer(http, name)) == without_cache(listed)
    # The steps of a beam search append to a list.
    assert [bool(each) for each in arrived[num_listed:]] == [name != "beams"] * num_listed


@pytest.mark.parametrize("wrong", [[5, 10**6], [5, -1], [5, True], [5, 2**32], [5, "x"], [5, 0.5]])
async def test_wrong_ids_of_a_long_prompt_are_named(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, wrong: list[object]
) -> None:
    body = {"model": MODEL, "prompt": [IDS + wrong], "max_tokens": 1}
    listed = await http.post("/v1/completions", json=body)
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 8)
    packed = await http.post("/v1/completions", json=body)
    assert (packed.status_code, packed.json()) == (listed.status_code, listed.json())
    assert packed.status_code == 400
