"""Bodies are counted before they are built; of large ones only known fields are built, in a thread."""

import asyncio
import functools
import gc
import json
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.http import large_json, request_body
from tokenloom.services.gateway.http.http_exchange import IGNORED_HEADER
from tokenloom.services.gateway.http.large_json import check_amount
from tokenloom.services.gateway.http.request_body import BodyParser
from tokenloom.services.gateway.openai.body_reader import WITHOUT_EFFECT
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.routes.api_routes import READ_FIELDS

SIZE = 8 << 20
COMPLETIONS = "/v1/completions"
HOSTILE: dict[str, Callable[[], bytes]] = {
    "objects": lambda: b'{"x":[' + b"{}," * (SIZE // 3 - 4) + b"{}]}",
    "arrays": lambda: b'{"prompt":[' + b"[]," * (SIZE // 3 - 6) + b"[]]}",
    "nested": lambda: b'{"prompt":[' + b"[[]]," * (SIZE // 5 - 6) + b"[]]}",
    "deep": lambda: b'{"prompt":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2 - 16) + b"}",
    "stops": lambda: b'{"prompt":"a","stop":[' + b'"s",' * 1_000_000 + b'"s"]}',
    "stops of escapes": lambda: b'{"prompt":"a","stop":[' + b'"\\"\\\\",' * 1_000_000 + b'"s"]}',
    "biases": lambda: b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % id_ for id_ in range(500_000)) + b"}}",
    "names": lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(600_000)) + b"}",
    "numbers": lambda: b'{"prompt":[' + b"1," * (SIZE // 2 - 10) + b"1]}",
    "junk numbers": lambda: b'{"prompt":["",' + b"1," * 1_500_000 + b"1]}",
}


@functools.cache
def hostile(name: str) -> bytes:
    """Return one of these bodies; some take long to write, and each is needed in one process only."""
    return HOSTILE[name]()


@pytest.fixture
def parser() -> Iterator[BodyParser]:
    parser = BodyParser(READ_FIELDS, WITHOUT_EFFECT)
    yield parser
    parser.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_body_of_too_many_parts_is_refused_before_they_are_built(name: str, parser: BodyParser) -> None:
    assert len(hostile(name)) > request_body.OFF_LOOP_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="the body holds more than"):
            await parser.read(hostile(name), dict)
        assert tracemalloc.get_traced_memory()[1] < 4 * SIZE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "junk numbers"])
def test_counting_ends_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few slices are counted, however long the body is."""
    monkeypatch.setattr(large_json, "SLICE_BYTES", 1 << 18)
    num_slices = 0

    def counted(data: bytes, start: int) -> int:
        nonlocal num_slices
        num_slices += 1
        return original(data, start)

    original = large_json._slice_end
    monkeypatch.setattr(large_json, "_slice_end", counted)
    with pytest.raises(InvalidArgument):
        check_amount(hostile(name))
    assert num_slices <= (13 if name == "numbers" else 6)


async def test_only_known_fields_of_a_large_body_are_built(parser: BodyParser) -> None:
    body = {"model": MODEL, "prompt": "a", "user": ["x" * (2 << 20)], "junk": "x" * (2 << 20), "more": "y"}
    data = json.dumps(body).encode()
    tracemalloc.start()
    try:
        found = await parser.read(data, dict)
        assert tracemalloc.get_traced_memory()[1] < 3 * large_json.SLICE_BYTES + (1 << 20)
    finally:
        tracemalloc.stop()
    assert found == {"model": MODEL, "prompt": "a", "user": True, "junk": True}


async def test_a_large_body_is_read_in_a_thread(parser: BodyParser) -> None:
    def ident(body: dict[str, Any]) -> int:
        return threading.get_ident()

    small, large = (json.dumps({"prompt": "x" * size}).encode() for size in (10, request_body.OFF_LOOP_BYTES))
    assert await parser.read(small, ident) == threading.get_ident()
    assert await parser.read(large, ident) != threading.get_ident()


LARGE_IDS = list(range(100_000, 400_000))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": 'quotes " and \\ backslashes \\" \\\\' * 100_000},
        {"prompt": "é\u2028😀\n" * 100_000, "stop": ["\\", '"', '\\"', "[{,"]},
        {"prompt": [", [ { " * 1000] * 1000},
        {"prompt": LARGE_IDS},
        {"prompt": [[1.0, *LARGE_IDS], [], [5], LARGE_IDS]},
        {"prompt": [[1.5, *LARGE_IDS], 7, None, True, LARGE_IDS]},
        {"prompt": [LARGE_IDS, [[1], 5], LARGE_IDS]},
        {"messages": [{"role": "user", "content": "[{,}]" * 1000}] * 1000, "logit_bias": {"1": 2.5}},
    ],
    ids=["escapes", "unicode", "texts", "ids", "lists", "mixed", "nested", "chat"],
)
@pytest.mark.parametrize(("indent", "is_ascii"), [(None, False), (1, True)])
async def test_a_large_body_is_decoded_exactly(
    parser: BodyParser, body: dict[str, Any], indent: int | None, is_ascii: bool
) -> None:
    data = json.dumps(body, indent=indent, ensure_ascii=is_ascii).encode()
    assert await parser.read(data, dict) == body
    assert await parser.read(bytearray(data), dict) == body


def test_parts_are_counted_exactly_wherever_slices_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a count of the decoded value; texts are made of what could confuse it."""
    draw = random.Random(3)

    def text() -> str:
        return "".join(draw.choices('"\\,[{a:é', k=draw.randrange(12)))

    for _ in range(300):
        value = [{text(): [text() for _ in range(draw.randrange(4))]} for _ in range(draw.randrange(5))]
        data = msgspec.json.encode(value)
        monkeypatch.setattr(large_json, "SLICE_BYTES", draw.randrange(2, 30))
        found = list(large_json._outside_strings(data))
        outside = b"".join(part for _, part in found)
        assert sum(quotes for quotes, _ in found) == 2 * sum(1 + len(v) for part in value for v in part.values())
        assert outside.count(b"[") == 1 + len(value)
        assert outside.count(b"{") == len(value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" + b"1, " * 200_000 + b"1]", "must be a JSON object"),
        (b'"' + b"a" * 200_000 + b'"', "must be a JSON object"),
        (b'{"prompt":"' + b"a" * 200_000, "not valid JSON"),
        (b'{"prompt":[' + b"123456," * 600_000 + b"]}", "not valid JSON"),
        (b'{"prompt":[' + b"123456," * 600_000 + b"NaN]}", "not valid JSON"),
        (b'{"prompt":"' + b"a" * 200_000 + b'\xff"}', "not valid UTF-8"),
        (b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}" + b" " * 200_000, "nested too deeply"),
        (b'{"user":' + b"[" * 20_000 + b"]" * 20_000 + b"}" + b" " * 200_000, "nested too deeply"),
    ],
)
async def test_a_large_body_that_is_not_a_json_object(parser: BodyParser, data: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await parser.read(data, dict)


@pytest.mark.parametrize("size", [0, 200_000])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (rb'{"prompt":"%b\ud800"}', r"\\ud800 is half a surrogate pair"),
        (rb'{"prompt":"%b\ud800","max_tokens":2,"temperature":0}', r"\\ud800 is half a surrogate pair"),
        (rb'{"prompt":"%b\ud800\u0041","max_tokens":2}', r"\\ud800 is half a surrogate pair"),
        (rb'{"stop":"\ud800","prompt":"%b"}', r"\\ud800 is half a surrogate pair"),
        (rb'{"prompt":"%b\u12"}', "malformed"),
        (rb'{"prompt":"%b\uDBff\n"}', r"\\uDBff is half a surrogate pair"),
        (rb'{"prompt":"%b\\\ud83d\ud"}', r"\\ud83d is half a surrogate pair"),
        (rb'{"prompt":"%b","\ud800":1}', r"\\ud800 is half a surrogate pair"),
        (rb'{"prompt":"%b\udc00"}', "surrogate pair"),
        (rb'{"prompt":"%b\ud83d\ude00"', "truncated"),
        (rb'{"prompt":"%b\ud83d\u', "truncated"),
        (rb'{"prompt":"%b\\ud800"', "truncated"),
    ],
)
async def test_half_a_surrogate_pair_is_named(parser: BodyParser, text: bytes, words: str, size: int) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await parser.read(text % (b"a" * size), dict)


@pytest.mark.parametrize("name", HOSTILE)
async def test_the_gateway_refuses_it(name: str, mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, content=hostile(name)[:SIZE], headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert len(response.text) < 500


async def test_a_body_is_dropped_before_generation_begins(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """Neither the bytes nor what they were decoded to live as long as the stream that they ask for."""
    small = {"model": MODEL, "prompt": "hi", "stream": True}
    large = small | {"junk": "x" * (2 << 20), "metadata": {"a": "y" * (2 << 20)}}
    content, headers = json.dumps(large).encode(), {"content-type": "application/json"}
    for traced in (False, True):  # the first time makes what lives longer than a request
        if traced:
            tracemalloc.start()
        try:
            sending = asyncio.create_task(http.post(COMPLETIONS, content=content, headers=headers))
            request = await mesh.outputs.next_request()
            gc.collect()
            held, jobs = (
                tracemalloc.get_traced_memory()[0],
                [each for each in gc.get_objects() if type(each) is GenerateRequest],
            )
        finally:
            tracemalloc.stop()
        request.answer("fine")
        assert (await sending).status_code == 200
        assert held < 1 << 20
        assert not jobs


async def test_fields_without_effect_of_a_large_body_are_named(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    body = {"model": MODEL, "prompt": "a", "user": "x" * request_body.OFF_LOOP_BYTES, "store": True, "metadata": None}
    response = await http.post(COMPLETIONS, json=body)
    assert sorted(response.headers[IGNORED_HEADER.decode()].split(", ")) == ["store", "user"]


async def test_unknown_fields_of_a_large_body(mesh: FakeMesh, http: httpx.AsyncClient, caplog: Any) -> None:
    mesh.outputs.auto = ["x"]
    junk = {"model": MODEL, "prompt": "a", "surprise": "x" * request_body.OFF_LOOP_BYTES}
    response = await http.post(COMPLETIONS, json=junk)
    assert response.headers[IGNORED_HEADER.decode()] == "surprise"
    assert "ignoring the unknown request field 'surprise'" in caplog.text
