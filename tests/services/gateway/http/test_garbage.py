"""Requests end without reference cycles, so that their memory does not wait for the garbage collector."""

import gc
from collections.abc import Iterator
from types import FrameType
from typing import Any

import httpx
import pytest

from tests.loop_clock import settle
from tests.services.gateway.fakes import MODEL, FakeMesh

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "ab", "max_tokens": 10}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """Collects nothing during the test; what is unreachable at its end stays in this list."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _is_ours(thing: object) -> bool:
    """Return whether the gateway or uvicorn has made the object, rather than the client or a fake of this test."""
    if isinstance(thing, FrameType):
        return "/services/gateway/" in thing.f_code.co_filename.replace("/tests/", "")
    return type(thing).__module__.startswith(("tokenloom.services.gateway.", "uvicorn."))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", COMPLETION, 200),
        ("/v1/completions", {**COMPLETION, "stream": True}, 200),
        ("/v1/completions", {**COMPLETION, "max_tokens": -1}, 400),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/chat/completions", {**CHAT, "model": "none"}, 404),
    ],
)
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_request_leaves_no_cycle(
    mesh: FakeMesh,
    http: httpx.AsyncClient,
    garbage: list[object],
    path: str,
    body: dict[str, Any],
    status: int,
    connection: str,
) -> None:
    mesh.outputs.auto = ("a", "b")
    for _ in range(3):  # what the last one leaves may still be in use
        assert (await http.post(path, json=body, headers={"connection": connection})).status_code == status
    await settle()
    gc.collect()
    assert [type(each) for each in garbage if _is_ours(each)] == []
