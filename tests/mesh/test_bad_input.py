"""Bad requests through the real mesh: refused by field and at once, while a good one goes on undisturbed."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.cpu_time import MOST_TIMES_USUAL, least_cpu_seconds, usual_cpu_seconds
from tests.mesh.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Mesh
from tests.ready_channel import ready_channel
from tests.services.gateway.openai.bad_requests import CHAT, COMPLETIONS, RAW_BODIES, BadBody, bad_bodies, bad_calls
from tokenloom.v1 import inference_pb2_grpc

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    COMPLETIONS: {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2},
}


async def _refused(http: httpx.AsyncClient, bad: BadBody, body: dict[str, Any]) -> None:
    response = await http.post(bad.path, json=body)
    assert response.status_code == bad.status, (bad, response.text)
    assert response.json()["error"]["param"] == bad.param, (bad, response.text)


async def test_nothing_bad_disturbs_anybody(socket_dir: Path) -> None:
    async with (
        Mesh(socket_dir, engine={"hash_step_seconds": 0.01}).running() as mesh,
        mesh.http() as http,
        ready_channel(mesh.gateway.settings.listen) as channel,
    ):
        canary_body = {
            "model": MODEL,
            "prompt": [5, 6],
            "max_tokens": 150,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        canary = asyncio.create_task(http.post(COMPLETIONS, json=canary_body))
        await mesh.until_running()
        slow: list[str] = []
        usual = await usual_cpu_seconds(lambda: http.post(COMPLETIONS, json=GOOD[COMPLETIONS]))
        most = MOST_TIMES_USUAL * usual  # all services, and the canary's steps, share this thread
        for bad in bad_bodies(VOCAB_SIZE, MAX_MODEL_LEN):
            good = {k: v for k, v in GOOD[bad.path].items() if not (bad.param == "prompt" and k == "prompt")}
            refuse = partial(_refused, http, bad, {**good, **bad.fields})
            seconds = await least_cpu_seconds(refuse, most)
            if seconds > most:
                slow.append(f"{bad}: {seconds:.3f} s of the processor")
        for body in RAW_BODIES.values():
            refused = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            assert refused.status_code == 400
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name, (request, _) in bad_calls(MODEL, VOCAB_SIZE, MAX_MODEL_LEN).items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.Generate(request)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert not slow
        (choice,) = (await canary).json()["choices"]
        assert choice["token_ids"] == mesh.expected([5, 6], 150)
        for path, good in GOOD.items():
            assert (await http.post(path, json=good)).status_code == 200
        await mesh.until_idle()


@pytest.mark.asyncio(loop_scope="module")
async def test_template_arguments_replace_no_conversation(mesh: Mesh) -> None:
    async with mesh.http() as http:
        plain = (await http.post(CHAT, json={**GOOD[CHAT], "return_token_ids": True})).json()
        for kwargs in ({"tools": [{"name": "f"}]}, {"messages": []}, {"shiny": 5}):
            body = {**GOOD[CHAT], "return_token_ids": True, "chat_template_kwargs": kwargs}
            assert (await http.post(CHAT, json=body)).json()["prompt_token_ids"] == plain["prompt_token_ids"]
