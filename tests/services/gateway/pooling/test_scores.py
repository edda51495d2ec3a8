"""Tests ``/score`` and ``/rerank``."""

from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh, FakeRequest
from tests.services.gateway.pooling.conftest import CLASSIFY, EMBED, SCORE


def _unit(request: FakeRequest) -> None:
    """The vector of a text points along its first letter."""
    letter = request.submit.prompt.token_ids[0]
    request.pool([float(letter == ord("a")), float(letter == ord("b"))])
    request.finish()


async def _scores(http: httpx.AsyncClient, path: str = "/score", **body: Any) -> list[float]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return [item["score"] for item in response.json()["data"]]


@pytest.mark.parametrize("tasks", [[SCORE]])
async def test_a_cross_encoder_reads_both_texts(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert await _scores(http, text_1="abc", text_2=["d", "ef"]) == pytest.approx([0.04, 0.05])
    submits = [request.submit for request in mesh.outputs.sessions[0].requests.values()]
    assert [list(map(chr, submit.prompt.token_ids)) for submit in submits] == [list("abcd"), list("abcef")]
    assert {submit.pooling_params.first_part_tokens for submit in submits} == {3}


@pytest.mark.parametrize("tasks", [[EMBED]])
async def test_vectors_are_compared(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.pool = _unit
    assert await _scores(http, queries="a", documents=["a1", "b1", "a2"]) == [1.0, 0.0, 1.0]
    assert await _scores(http, "/v1/score", text_1=["a", "b"], text_2=["a1", "b1"]) == [1.0, 1.0]


@pytest.mark.parametrize("tasks", [[EMBED]])
async def test_documents_come_in_the_order_of_their_relevance(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.pool = _unit
    body: dict[str, Any] = {"query": "a", "documents": ["b1", {"text": "a1"}]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = (await http.post(path, json=body)).json()
    assert answer["id"].startswith("rerank-")
    assert answer["usage"]["total_tokens"] == 5
    assert answer["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "a1"}},
        {"index": 0, "relevance_score": 0.0, "document": {"text": "b1"}},
    ]
    short = (await http.post(path, json=body | {"top_n": 1, "return_documents": False})).json()
    assert short["results"] == [{"index": 1, "relevance_score": 1.0}]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/score", {"text_1": "a"}, "text_2"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/score", {"text_1": "a", "text_2": [1]}, "text_2"),
    ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
]


@pytest.mark.parametrize("tasks", [[SCORE], [EMBED]])
async def test_what_is_refused(http: httpx.AsyncClient) -> None:
    for path, body, field in REFUSED:
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), (path, body, response.text)


@pytest.mark.parametrize("tasks", [[CLASSIFY]])
async def test_a_classifier_scores_nothing(http: httpx.AsyncClient) -> None:
    response = await http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert response.json()["error"]["message"].endswith("the task score; its pooling tasks are: classify")
