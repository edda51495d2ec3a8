"""Outputs that follow a grammar, through all services; the hash worker draws any token that is allowed."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.mesh.harness import MODEL, Mesh
from tests.mesh.split import SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
CODE = r"[A-Z]{2}-\d{3}"
BOMBS: list[dict[str, Any]] = [
    {"json": {"type": "integer", "multipleOf": 99_999_989}},
    {"json": {"type": "number", "multipleOf": 0.99999989}},
    {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    {"regex": "(.*a){25}(.*b){25}(.*c.{400}){25}"},
    {"grammar": "start: A\nA: /(.*a.{20})/ & /(.*b.{20})/ & ~/(.*c.{20})/"},
    {"grammar": "root ::= " + "(" * 10_000},
    {"json": {"allOf": [{"properties": {f"k{n}": {"type": "string"}}} for n in range(400)]}},
    {"json": {"type": "array", "minItems": 1_000_000, "items": {"type": "string", "minLength": 1_000_000}}},
]


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": MODEL, "prompt": "Once", "max_tokens": 200, **fields})


async def test_response_format(http: httpx.AsyncClient) -> None:
    schema = {"name": "person", "strict": True, "schema": PERSON}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who?"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 200,
    }
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", answer
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": CODE}, CODE),
        ({"choice": ["red", "light blue", "é"]}, "red|light blue|é"),
        ({"grammar": 'root ::= "<" [a-c] [a-c] ">"'}, "<[a-c][a-c]>"),
    ],
)
async def test_vllms_structured_outputs(http: httpx.AsyncClient, constraint: dict[str, Any], pattern: str) -> None:
    answer = (await complete(http, structured_outputs=constraint)).json()
    (choice,) = answer["choices"]
    assert re.fullmatch(pattern, choice["text"]), answer
    assert choice["finish_reason"] == "stop"
    again = (await complete(http, structured_outputs=constraint, ignore_eos=True)).json()
    assert re.fullmatch(pattern, again["choices"][0]["text"])
    assert again["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tag", "pattern"),
    [
        (
            {
                "structures": [{"begin": "<call=f>", "schema": {"enum": [1, 2]}, "end": "</call>"}],
                "triggers": ["<call="],
            },
            r"(?s)(?!.*<call=f>(?![12]</call>)).*",
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "Call: "},
                        {
                            "type": "tag",
                            "begin": "<call>",
                            "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                            "end": "</call>",
                        },
                    ],
                }
            },
            "Call: <call>[12]</call>",
        ),
    ],
    ids=["legacy", "format"],
)
async def test_structural_tags(http: httpx.AsyncClient, tag: dict[str, Any], pattern: str) -> None:
    for fields in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **tag})}},
    ):
        answer = (await complete(http, **fields)).json()
        assert re.fullmatch(pattern, answer["choices"][0]["text"]), answer


async def test_a_format_that_the_backend_lacks_is_refused_with_the_one_that_has_it(http: httpx.AsyncClient) -> None:
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}}
    response = await complete(http, response_format=tag)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert "xgrammar" in error["message"]


@pytest.mark.parametrize(
    ("options", "blank"), [({"disable_any_whitespace": True}, ""), ({"whitespace_pattern": "~"}, "~?")], ids=str
)
async def test_blanks_are_chosen_by_the_request(http: httpx.AsyncClient, options: dict[str, Any], blank: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    answer = (await complete(http, structured_outputs={"json": schema, **options})).json()
    assert re.fullmatch(blank.join(["{", '"a"', ":", "[12]", "}"]), answer["choices"][0]["text"]), answer


async def test_every_sample_follows_the_grammar(http: httpx.AsyncClient) -> None:
    answer = (await complete(http, structured_outputs={"regex": CODE}, n=5, temperature=1.0)).json()
    assert len(answer["choices"]) == 5
    assert all(re.fullmatch(CODE, choice["text"]) for choice in answer["choices"])


async def test_public_grpc(mesh: Mesh) -> None:
    params = types_pb2.SamplingParams(max_tokens=50, structured_outputs=types_pb2.StructuredOutputs(regex=CODE))
    request = inference_pb2.GenerateRequest(text="Once", sampling_params=params)
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        text = "".join([output.text async for output in stub.Generate(request)])
    assert re.fullmatch(CODE, text)


async def test_bombs_harm_nobody(http: httpx.AsyncClient) -> None:
    await complete(http, structured_outputs={"regex": CODE})  # compilers are up

    async def canary() -> float:
        slowest = 0.0
        while not all(task.done() for task in bombs):
            before = time.monotonic()
            assert (await complete(http, max_tokens=5)).status_code == 200
            slowest = max(slowest, time.monotonic() - before)
        return slowest

    started = time.monotonic()
    bombs = [asyncio.create_task(complete(http, structured_outputs=bomb, max_tokens=20)) for bomb in BOMBS]
    slowest = await canary()
    for bomb, task in zip(BOMBS, bombs, strict=True):
        response = task.result()
        # What the engine can bound it may as well answer.
        assert response.status_code in (200, 400), (bomb, response.text)
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "structured_outputs"
    assert (bombs[0].result().status_code, bombs[4].result().status_code) == (400, 400)
    assert slowest < (time.monotonic() - started) / 2, "an engine that compiled bombs between steps would hold it up"
    assert (await complete(http, structured_outputs={"regex": CODE})).status_code == 200


async def test_a_neighbours_stream_flows_on_while_a_bomb_is_compiled(socket_dir: Path) -> None:
    """How late its tokens come at most, and the answer: ``python -m tests.soak.bombs``."""
    async with Mesh(socket_dir).running() as mesh, mesh.http() as http:  # that has not refused this bomb before
        assert await tokens_beside_a_bomb(http) > 5, "an engine that compiled it between two steps would send none"


async def tokens_beside_a_bomb(http: httpx.AsyncClient) -> int:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    bomb: asyncio.Task[httpx.Response] | None = None
    meanwhile = 0
    while bomb is None or not bomb.done():
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if bomb is None:
                    bomb = asyncio.create_task(complete(http, structured_outputs=BOMBS[0]))
                elif line.startswith("data: {") and not bomb.done():
                    meanwhile += 1
    assert bomb.result().status_code == 400
    return meanwhile


@pytest_asyncio.fixture(loop_scope="module")
async def split(socket_dir: Path) -> AsyncIterator[SplitMesh]:
    async with SplitMesh(socket_dir).running() as mesh:
        yield mesh


async def test_a_grammar_goes_on_where_the_prefill_left_it(split: SplitMesh) -> None:
    async with split.http() as http:
        for n in range(8):
            prompt = list(range(1, 40 + n))
            answer = (await complete(http, prompt=prompt, structured_outputs={"json": PERSON})).json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop", answer
            jsonschema.validate(json.loads(choice["text"]), PERSON)
        for engine in split.engines:
            await engine.until(lambda engine: engine.is_idle)
    for engine in split.engines:
        engine.check_idle()
        assert engine.core.num_steps > 0
