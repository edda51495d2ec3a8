"""``Last-Event-ID`` and ``Idempotency-Key``: what the output processors are asked for, and what is refused."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tests.services.gateway.openai.joined import join_events
from tokenloom.request import errors

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "a", "stream": True}
REQUEST_ID = "ab" * 20
EVENT_ID = f"{REQUEST_ID}.1.3-3"
LOST = errors.RequestLost("The request is not known.")


async def post(http: httpx.AsyncClient, headers: dict[str, str], **fields: Any) -> httpx.Response:
    return await http.post(PATH, json={**BODY, **fields}, headers=headers)


def events(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    *events, done = [event for event in response.text.split("\n\n") if event]
    assert done == "data: [DONE]"
    return events


async def test_a_stream_continues_after_an_event(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {"Last-Event-ID": "0"}))
    first = await mesh.outputs.next_request()
    submit = first.submit
    assert len(submit.fingerprint) == 16
    assert not submit.take_over
    assert len(submit.request_id) == 40
    first.answer("one", " two", " three")
    whole = events(await task)
    for number in range(1, len(whole) + 1):
        last_id = whole[number - 1].split("\n")[0].removeprefix("id: ")
        task = asyncio.create_task(post(http, {"Last-Event-ID": last_id}))
        request, resume = await mesh.outputs.next_resume()
        assert (resume.request_id, resume.fingerprint) == (submit.request_id, submit.fingerprint)
        assert not resume.positions
        request.answer("one two", " thr", "ee")
        assert join_events(whole[:number] + events(await task)) == join_events(whole)


NUMBERED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 64, "stream": True},
    "/v1/responses": {"model": MODEL, "input": "a", "stream": True},
}


def numbered(response: httpx.Response) -> list[str]:
    """Return the events, without how many tokens had come with each."""
    assert response.status_code == 200, response.text
    blocks = [event for event in response.text.split("\n\n") if event]
    return [re.sub(r"^(id: \S+)-\d+\n", r"\1\n", block) for block in blocks]


@pytest.mark.parametrize("path", NUMBERED)
async def test_a_stream_of_numbered_events_continues_after_one(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str
) -> None:
    def ask(last_id: str) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(http.post(path, json=NUMBERED[path], headers={"Last-Event-ID": last_id}))

    task = ask("0")
    first = await mesh.outputs.next_request()
    first.answer("one", " two", " three")
    begun = await task
    whole, ids = numbered(begun), re.findall(r"^id: (\S+)", begun.text, re.MULTILINE)
    assert len(whole) == len(ids) > 5
    for number, last_id in enumerate(ids, 1):
        task = ask(last_id)
        request, resume = await mesh.outputs.next_resume()
        assert (resume.request_id, resume.fingerprint) == (first.submit.request_id, first.submit.fingerprint)
        request.answer("one two", " thr", "ee")
        assert whole[:number] + numbered(await task) == whole


async def test_a_stream_whose_events_have_no_ids_is_not_resumed(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    answer = await http.post("/api/chat", json=body, headers={"Last-Event-ID": "0"})
    assert answer.status_code == 400
    assert "Idempotency-Key" in answer.text


async def test_a_plain_stream_has_no_ids_and_is_not_kept(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {}))
    request = await mesh.outputs.next_request()
    assert not request.submit.fingerprint
    request.answer("x")
    assert all(event.startswith("data: ") for event in events(await task))


async def test_an_unknown_request_is_lost(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {"Last-Event-ID": EVENT_ID}))
    await mesh.outputs.answers_unknown(task)
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (404, "request_lost")


async def test_a_request_that_its_gateway_places_again_is_found(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """While another gateway holds it, because it has lost its output processor, every one answers that it is unknown:
    the client of a request that went on got 404."""
    task = asyncio.create_task(post(http, {"Last-Event-ID": EVENT_ID}))
    (await mesh.outputs.next_resume())[0].fail(LOST)
    request, _ = await mesh.outputs.next_resume()
    request.answer("abcd")
    assert json.loads(events(await task)[0].partition("data: ")[2])["choices"][0]["text"] == "d"


async def test_an_output_processor_that_is_away_is_waited_for(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {"Last-Event-ID": EVENT_ID}))
    await mesh.outputs.next_resume()
    mesh.outputs.sessions[-1].end()  # it may have the request again when it is connected again
    request, _ = await mesh.outputs.next_resume()
    request.answer("abcd")
    assert json.loads(events(await task)[0].partition("data: ")[2])["choices"][0]["text"] == "d"


async def test_another_body_is_refused(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {"Last-Event-ID": EVENT_ID}))
    (await mesh.outputs.next_resume())[0].fail(errors.BodyChanged("The body differs."))
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (422, "body_changed")


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"Last-Event-ID": "41"}, {}, "Last-Event-ID"),
        ({"Last-Event-ID": EVENT_ID}, {"stream": False}, "Last-Event-ID"),
        ({"Last-Event-ID": f"{REQUEST_ID}.1.3-3_1-1"}, {}, "Last-Event-ID"),
        ({"Idempotency-Key": "k" * 256}, {}, "Idempotency-Key"),
        ({"Idempotency-Key": ""}, {}, "Idempotency-Key"),
    ],
)
async def test_malformed_headers(
    http: httpx.AsyncClient, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    response = await post(http, headers, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_key_names_the_request(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    submits = []
    for key, fields in (("k", {}), ("k", {}), ("other", {}), ("k", {"prompt": "b"})):
        task = asyncio.create_task(post(http, {"Idempotency-Key": key}, stream=False, **fields))
        request = await mesh.outputs.next_request()
        assert request.submit.take_over
        submits.append(request.submit)
        request.answer("x")
        assert (await task).json()["id"] == f"cmpl-{request.submit.request_id}"
    first, repeat, other, changed = submits
    assert (first.request_id, first.fingerprint) == (repeat.request_id, repeat.fingerprint)
    assert other.request_id != first.request_id
    assert changed.request_id == first.request_id
    assert changed.fingerprint != first.fingerprint


async def test_a_taken_over_stream_ends_with_its_error(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(post(http, {"Idempotency-Key": "k"}, stream=False))
    (await mesh.outputs.next_request()).fail(errors.Aborted("The answer continues in another call."))
    response = await task
    assert (response.status_code, response.json()["error"]["code"]) == (409, "aborted")


async def test_a_beam_search_is_searched_again(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """It is neither kept nor taken over: each call searches, and the answers of one key have one id."""
    ids = []
    for _ in range(2):
        task = asyncio.create_task(
            post(http, {"Idempotency-Key": "k"}, stream=False, use_beam_search=True, n=1, max_tokens=1)
        )
        request = await mesh.outputs.next_request()
        submit = request.submit
        assert not submit.fingerprint
        assert not submit.take_over
        request.fail(errors.InvalidArgument("no"))
        assert (await task).status_code == 400
        ids.append(submit.request_id)
    assert ids[0] != ids[1]
