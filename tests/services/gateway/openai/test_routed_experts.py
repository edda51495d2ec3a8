"""The experts of an answer's tokens are a .npy file in its choice, streamed or not."""

import asyncio
import base64
import io
import json

import httpx
import numpy as np
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.v1.types_pb2 import RoutedExperts

EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
BODIES = {
    "chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": MODEL, "prompt": "hi"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_choice_holds_the_array(path: str, stream: bool, mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.post(f"/v1/{path}", json=BODIES[path] | {"stream": stream}))
    request = await mesh.outputs.next_request()
    request.send("x", [7])
    part = RoutedExperts(start=0, num_layers=2, top_k=2, id_bytes=1, expert_ids=EXPERTS.tobytes())
    request.finish(routed_experts=part)
    response = await task
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line][:-1]
        choice = json.loads(events[-1])["choices"][0]
    else:
        choice = response.json()["choices"][0]
    assert np.array_equal(np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))), EXPERTS)


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_without_experts_has_none(path: str, mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    response = await http.post(f"/v1/{path}", json=BODIES[path] | {"return_routed_experts": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_routed_experts"
