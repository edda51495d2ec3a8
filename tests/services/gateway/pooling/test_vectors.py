"""Tests ``/v1/embeddings``, ``/pooling`` and ``/classify``."""

import struct
from base64 import b64decode
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.pooling.conftest import CLASSIFY, EMBED
from tokenloom.request import packed_ids
from tokenloom.services.gateway.generation import running_pooling
from tokenloom.v1 import types_pb2


async def embed(http: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


async def test_one_input_or_several(http: httpx.AsyncClient) -> None:
    assert await embed(http, input="abc") == [[3, 97]]
    assert await embed(http, input=["abc", "b"]) == [[3, 97], [1, 98]]
    assert await embed(http, input=[5, 6]) == [[2, 5]]
    assert await embed(http, input=[[5, 6], [7]]) == [[2, 5], [1, 7]]


async def test_the_answer_has_openais_form(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/embeddings", json={"input": ["abc", "b"], "model": "fake"})).json()
    assert answer.pop("id").startswith("embd-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "list",
        "model": "fake",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 97.0]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 98.0]},
        ],
        "usage": {"prompt_tokens": 4, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
    }


async def test_base64_holds_float32(http: httpx.AsyncClient) -> None:
    (text,) = await embed(http, input="abc", encoding_format="base64")
    assert struct.unpack("<2f", b64decode(text)) == (3.0, 97.0)


async def test_parameters_reach_the_engine(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await embed(http, input="abc", dimensions=2, normalize=False, cache_salt="mine")
    (request,) = mesh.outputs.sessions[0].requests.values()
    params = types_pb2.PoolingParams(task=EMBED, dimensions=2, use_activation=False)
    assert (request.submit.pooling_params, list(request.submit.prompt.token_ids)) == (params, [97, 98, 99])
    assert request.submit.HasField("timeout")
    assert request.submit.prompt.cache_salt


async def test_a_long_input_comes_packed(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_ids, "LONG_PROMPT", 4)
    assert await embed(http, input=["abc", "abcdef"]) == [[3, 97], [6, 97]]
    monkeypatch.setattr(running_pooling, "check_sizes", lambda *_: None)  # as if the longest token were not known
    response = await http.post("/v1/embeddings", json={"input": "a" * 600})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_inputs_are_cut(http: httpx.AsyncClient) -> None:
    for given in ("abc", [[97, 98, 99]]):
        assert await embed(http, input=given, truncate_prompt_tokens=2) == [[2, 98]]
        assert await embed(http, input=given, truncate_prompt_tokens=2, truncation_side="right") == [[2, 97]]
        assert await embed(http, input=given, truncate_prompt_tokens=-1) == [[3, 97]]


async def test_a_conversation_is_an_input(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    (vector,) = await embed(http, messages=[{"role": "user", "content": "hi"}])
    (chat,) = mesh.tokenizer.chats + mesh.second_tokenizer.chats
    assert (vector[0], chat.add_generation_prompt) == (len(chat.messages_json), False)


async def test_2048_inputs_keep_their_order(http: httpx.AsyncClient) -> None:
    vectors = await embed(http, input=[[index % 256, 1] for index in range(2048)])
    assert vectors == [[2, index % 256] for index in range(2048)]


async def test_rows_of_tokens(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/pooling", json={"input": "ab"})).json()
    assert answer["data"] == [{"object": "pooling", "index": 0, "data": [[97.0, 97.0], [98.0, 98.0]]}]
    named = (await http.post("/pooling", json={"input": "ab", "task": "embed"})).json()
    assert named["data"][0]["data"] == [2.0, 97.0]


async def test_classes_have_their_names(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/classify", json={"input": ["a", "aaa"]})).json()
    assert [(item["label"], item["num_classes"], item["index"]) for item in answer["data"]] == [
        ("high", 2, 0),
        ("high", 2, 1),
    ]
    assert answer["data"][0]["probs"] == pytest.approx([1 / 98, 97 / 98])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ""}, "input"),
    ("/v1/embeddings", {"input": ["a", ""]}, "input"),
    ("/v1/embeddings", {"input": ["a", [5]]}, "input"),
    ("/v1/embeddings", {"input": [[]]}, "input"),
    ("/v1/embeddings", {"input": [256]}, "input"),
    ("/v1/embeddings", {"input": [[-1]]}, "input"),
    ("/v1/embeddings", {"input": [[1.5]]}, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("/v1/embeddings", {"input": [[1] * 513]}, "input"),
    ("/v1/embeddings", {"input": "a" * 513}, "input"),
    ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
    ("/pooling", {"input": "a", "task": "paint"}, "task"),
    ("/pooling", {"input": "a", "task": "score"}, "model"),
    ("/v1/completions", {"prompt": "a"}, "model"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
]


async def test_what_is_refused(http: httpx.AsyncClient) -> None:
    for path, body, field in REFUSED:
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), (path, body, response.text)


async def test_a_task_that_is_not_served_is_refused_with_those_that_are(http: httpx.AsyncClient) -> None:
    refused = await http.post("/pooling", json={"input": "a", "task": "token_classify"})
    assert "its pooling tasks are: embed, classify, token_embed" in refused.json()["error"]["message"]
    refused = await http.post("/v1/completions", json={"prompt": "a"})
    assert "does not generate text; its pooling tasks are: embed, classify" in refused.json()["error"]["message"]


@pytest.mark.parametrize("tasks", [[CLASSIFY]])
async def test_a_classifier_embeds_nothing(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/embeddings", json={"input": "a"})
    assert response.json()["error"]["message"].endswith("the task embed; its pooling tasks are: classify")


async def test_calls_are_counted(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await embed(http, input=["abc", "b"])
    page = (await http.get("/metrics")).text
    labels = 'model_name="fake",task="embed"'
    assert f"tokenloom_gateway_pooled_prompts_total{{{labels}}} 2.0" in page
    assert f"tokenloom_gateway_pooling_seconds_count{{{labels}}} 1.0" in page
    assert 'vllm:prompt_tokens_total{model_name="fake"} 4.0' in page
