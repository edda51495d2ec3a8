"""Tests calls in work: how many prompts are, and what happens when they fail or move."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import BLOCK_SIZE, FakeMesh, FakeRequest
from tests.services.gateway.pooling.conftest import TOKEN_EMBED
from tokenloom.request import errors
from tokenloom.request.prefix_schedule import prefix_hashes
from tokenloom.services.gateway.generation import admission, generator
from tokenloom.services.gateway.generation import running_pooling as pooling
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.mesh.output_pool import RETRY_SECONDS
from tokenloom.v1 import tokenizer_pb2, types_pb2


@pytest.fixture
def by_hand(mesh: FakeMesh) -> FakeMesh:
    """The test answers the requests."""
    mesh.outputs.pool = None
    return mesh


async def _embedding(http: httpx.AsyncClient, given: object) -> httpx.Response:
    return await http.post("/v1/embeddings", json={"input": given})


async def test_what_a_lost_gateway_had_read_is_not_refused_as_overload(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise errors.ResourceExhausted("busy")

    monkeypatch.setattr(admission.RequestAdmission, "_check_wait", refuse)
    monkeypatch.setattr(admission.WaitEstimator, "always_queued", property(lambda _: 0, lambda *_: None), raising=False)
    assert (await _embedding(http, "abc")).status_code == 503
    monkeypatch.setattr(HttpExchange, "was_read", property(lambda _: True, lambda *_: None))
    assert (await _embedding(http, "abc")).status_code == 200


async def test_few_prompts_are_in_work_at_once(
    by_hand: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "MOST_AT_ONCE", 3)
    call = asyncio.create_task(_embedding(http, [[index] for index in range(8)]))
    requests = [await by_hand.outputs.next_request() for _ in range(3)]
    assert by_hand.outputs.requests.empty()
    numbers = []
    while requests:
        request = requests.pop()  # the last one first
        numbers.append(request.submit.prompt.token_ids[0])
        request.pool([float(numbers[-1])])
        request.finish()
        if len(numbers) + len(requests) < 8:
            requests.append(await by_hand.outputs.next_request())
        assert by_hand.outputs.requests.empty()
    assert numbers != sorted(numbers)
    assert [item["embedding"] for item in (await call).json()["data"]] == [[index] for index in range(8)]


async def test_prompts_of_token_ids_are_hashed(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    ids = list(range(2 * BLOCK_SIZE + 1))
    call = asyncio.create_task(_embedding(http, ids))
    request = await by_hand.outputs.next_request()
    assert list(request.submit.block_hash_prefixes) == prefix_hashes(ids, BLOCK_SIZE)
    request.pool([1.0])
    request.finish()
    assert (await call).status_code == 200


async def test_a_result_that_begins_anew_replaces_its_parts(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(_embedding(http, "a"))
    request = await by_hand.outputs.next_request()
    request.pool([1.0, 2.0], [4])
    request.pool([3.0], [4], 2)
    for offset in (0, 2):
        request.pool([5.0, 6.0], [4], offset)
    request.finish()
    assert (await call).json()["data"][0]["embedding"] == [5.0, 6.0, 5.0, 6.0]


async def test_a_prompt_that_an_operator_ended_may_be_sent_again(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(_embedding(http, "a"))
    (await by_hand.outputs.next_request()).finish(types_pb2.FINISH_REASON_ABORT)
    response = await call
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(("offset", "shape"), [(1, [2]), (0, [2])])
async def test_a_result_with_missing_numbers_is_pooled_elsewhere(
    by_hand: FakeMesh, http: httpx.AsyncClient, offset: int, shape: list[int]
) -> None:
    call = asyncio.create_task(_embedding(http, "a"))
    request = await by_hand.outputs.next_request()
    request.pool([1.0], shape, offset)
    request.finish()
    await asyncio.wait_for(request.cancelled.wait(), 30)
    pass_time(RETRY_SECONDS)
    again = await by_hand.outputs.next_request()
    again.pool([1.0, 2.0])
    again.finish()
    assert (await call).json()["data"][0]["embedding"] == [1.0, 2.0]


async def test_an_end_without_a_result_is_an_error(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(_embedding(http, "a"))
    (await by_hand.outputs.next_request()).finish()
    assert (await call).status_code == 500


async def test_an_error_of_one_prompt_ends_the_others(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(_embedding(http, ["a", "b"]))
    first, second = [await by_hand.outputs.next_request() for _ in range(2)]
    first.fail(errors.InvalidArgument("dimensions is 9, the model's vectors have 8", "dimensions"))
    assert (await call).json()["error"]["param"] == "dimensions"
    await asyncio.wait_for(second.cancelled.wait(), 30)


async def test_results_beyond_the_limit_are_refused(
    by_hand: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "MAX_RESULT_BYTES", 8)
    call = asyncio.create_task(_embedding(http, "a"))
    (await by_hand.outputs.next_request()).pool([1.0, 2.0, 3.0])
    response = await call
    assert (response.status_code, "split the request" in response.text) == (400, True)


async def test_a_client_that_leaves_ends_its_prompts(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    call = asyncio.create_task(_embedding(http, ["a", "b"]))
    requests = [await by_hand.outputs.next_request() for _ in range(2)]
    call.cancel()
    for request in requests:
        await asyncio.wait_for(request.cancelled.wait(), 30)


async def test_a_lost_output_processor_costs_nothing(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.coordinator.limits = types_pb2.ModelLimits(
        max_model_len=512, vocab_size=256, pooling_tasks=[types_pb2.POOLING_TASK_EMBED]
    )
    addresses = (mesh.address("mesh"), mesh.address("second"))
    async with mesh.gateway(output_processors=addresses), mesh.http() as http:
        call = asyncio.create_task(_embedding(http, [[index] for index in range(6)]))
        lost = [await mesh.outputs.next_request() for _ in range(3)]
        kept = [await mesh.second_outputs.next_request() for _ in range(3)]
        lost[0].pool([9.0], [2])
        mesh.outputs.pool = mesh.second_outputs.pool = _echo
        mesh.outputs.sessions[0].end()
        for request in kept:
            _echo(request)
        assert [item["embedding"] for item in (await call).json()["data"]] == [[index, 1] for index in range(6)]


def _echo(request: FakeRequest) -> None:
    request.pool([float(request.submit.prompt.token_ids[0]), 1.0])
    request.finish()


class QueryEngine:
    """Holds queries as an engine does, and loses them all once."""

    def __init__(self) -> None:
        self.queries: dict[str, int] = {}
        self.loses_after = 3
        self.kept: list[int] = []

    def __call__(self, request: FakeRequest) -> None:
        late, ids = request.submit.pooling_params.late_interaction, request.submit.prompt.token_ids
        if late.num_documents:
            self.queries[late.query_id] = ids[0]
            self.kept.append(late.num_documents)
        elif late.query_id not in self.queries:
            request.fail(errors.QueryLost("the query is not held"))
            return
        else:
            request.pool([float(self.queries[late.query_id] * ids[0])], [])
            self.loses_after -= 1
            if not self.loses_after:
                self.queries.clear()
        request.finish()


@pytest.mark.parametrize("tasks", [[TOKEN_EMBED]])
async def test_a_query_that_is_lost_is_sent_again(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.pool = engine = QueryEngine()
    body = {"text_1": chr(2), "text_2": [chr(index) for index in range(1, 9)]}
    answer = (await http.post("/score", json=body)).json()
    assert [item["score"] for item in answer["data"]] == [2 * index for index in range(1, 9)]
    assert engine.kept == [8, 5], "three documents were scored before"


@pytest.mark.parametrize("tasks", [[TOKEN_EMBED]])
async def test_each_query_has_its_own_document(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.pool = QueryEngine()
    body = {"text_1": [chr(2), chr(3)], "text_2": [chr(5), chr(7)]}
    assert [item["score"] for item in (await http.post("/score", json=body)).json()["data"]] == [10, 21]


@pytest.mark.parametrize("tasks", [[TOKEN_EMBED]])
async def test_a_query_that_no_engine_keeps_is_unavailable(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.pool = engine = QueryEngine()
    engine.loses_after = 0
    engine.queries = _Forgetful()
    response = await http.post("/score", json={"text_1": "q", "text_2": ["a", "b"]})
    assert (response.status_code, engine.kept) == (503, [2, 2, 2])


class _Forgetful(dict[str, int]):
    def __contains__(self, _: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/embeddings", {"prompt_name": "query"}, "query"),
        ("/v1/embeddings", {}, ""),
        ("/pooling", {"task": "token_embed", "prompt_name": "query"}, "query"),
        ("/classify", {}, None),
    ],
)
async def test_prompts_are_for_texts_that_become_vectors(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, str], name: str | None
) -> None:
    response = await http.post(path, json={"input": "a", **body})
    assert response.status_code == 200
    (asked,) = _asked(mesh)
    assert (asked.prompt_name if asked.HasField("prompt_name") else None) == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [[1, 2]]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
        ("/pooling", {"input": "a", "task": "classify"}),
    ],
)
async def test_a_prompt_before_anything_else_is_refused(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    response = await http.post(path, json={**body, "prompt_name": "query"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_name")


async def test_the_tokens_of_a_prompt_take_no_part(by_hand: FakeMesh, http: httpx.AsyncClient) -> None:
    by_hand.tokenizer.skipped_tokens = by_hand.second_tokenizer.skipped_tokens = 3
    call = asyncio.create_task(_embedding(http, "a text"))
    request = await by_hand.outputs.next_request()
    assert request.submit.pooling_params.skipped_tokens == 3
    request.pool([1.0])
    request.finish()
    assert (await call).status_code == 200


@pytest.mark.parametrize(("max_sentence_tokens", "num_calls"), [(0, 0), (600, 1)])
async def test_a_long_text_reaches_a_tokenizer_that_cuts_it(
    mesh: FakeMesh, http: httpx.AsyncClient, num_calls: int
) -> None:
    assert (await _embedding(http, "a" * 600)).status_code == 400  # the fake cuts nothing
    assert len(_asked(mesh)) == num_calls


def _asked(mesh: FakeMesh) -> list[tokenizer_pb2.EncodeRequest]:
    return [*mesh.tokenizer.prompts, *mesh.second_tokenizer.prompts]
