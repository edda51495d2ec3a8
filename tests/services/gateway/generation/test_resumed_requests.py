"""Requests whose clients lose their connection to a mesh: they are resumed, repeated, cancelled, and charged once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import MODEL, SOON, FakeMesh, FakeRequest
from tokenloom.request import errors, wire_errors
from tokenloom.services.gateway.generation.charge import KEPT_SECONDS
from tokenloom.services.gateway.grpc.inference_request import read_resumption
from tokenloom.services.gateway.records.request_ids import id_of_key, seed_of
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import inference_pb2

SECONDS = 15.0
PATH = "/v1/completions"
BODY = json.dumps({"model": MODEL, "prompt": "a", "stream": True}).encode()
WHOLE = BODY.replace(b"true", b"false")
JSON = {"Content-Type": "application/json"}


async def hang_up(mesh: FakeMesh, headers: dict[str, str]) -> tuple[FakeRequest, str]:
    """Begin a stream over HTTP, and close its connection after the first event. Return its request and that event."""

    async def read_event() -> str:
        async with (
            mesh.http() as http,
            http.stream("POST", PATH, content=BODY, headers={**JSON, **headers}) as response,
        ):
            pieces = response.aiter_text()  # kept: httpx hangs up when it is collected
            return (await anext(pieces)).strip()

    reading = asyncio.create_task(read_event())
    request = await mesh.outputs.next_request()
    request.send("one", [1])
    return request, await reading


async def until_unattended(http: httpx.AsyncClient, count: int = 1) -> None:
    """Wait until the gateway runs so many requests without a client."""
    async with asyncio.timeout(SOON):
        while f"tokenloom_gateway_unattended_requests {count:.1f}" not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _text(event: str) -> str:
    return str(json.loads(event.partition("data: ")[2])["choices"][0]["text"])


async def test_an_http_client_whose_connection_ended_resumes(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    request, first = await hang_up(mesh, {"Last-Event-ID": "0"})
    await until_unattended(http)
    request.send(" two", [2])
    last_id = first.split("\n")[0].removeprefix("id: ")
    resuming = asyncio.create_task(http.post(PATH, content=BODY, headers={**JSON, "Last-Event-ID": last_id}))
    again, resume = await mesh.outputs.next_resume()
    assert resume.request_id == request.submit.request_id
    request.fail(errors.Aborted("The answer continues in another call."))
    again.answer("one", " two", " three")
    *rest, done = [event for event in (await resuming).text.split("\n\n") if event]
    assert done == "data: [DONE]"
    assert "".join(_text(event) for event in [first, *rest]) == "one two three"
    assert not request.cancelled.is_set()
    await until_unattended(http, 0)


async def test_an_answer_that_has_begun_is_resumed_whatever_first_token_was_promised(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    body = json.dumps({**json.loads(BODY), "ttft_deadline": 0.01}).encode()
    refused = await http.post(PATH, content=body, headers=JSON)
    assert refused.status_code == 503, "not even an idle mesh promises that"
    headers = {**JSON, "Last-Event-ID": f"{'ab' * 20}.1.1-3"}  # of a request of another gateway
    resuming = asyncio.create_task(http.post(PATH, content=body, headers=headers))
    again, _ = await mesh.outputs.next_resume()
    again.answer("one", " two")
    assert " two" in (await resuming).text


async def test_a_request_of_a_client_that_never_returns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    request, _ = await hang_up(mesh, {"Idempotency-Key": "k"})
    await until_unattended(http)
    pass_time(SECONDS + 1)
    async with asyncio.timeout(SOON):
        await request.cancelled.wait()


async def test_a_plain_client_that_hangs_up_cancels_at_once(mesh: FakeMesh) -> None:
    request, _ = await hang_up(mesh, {})
    async with asyncio.timeout(SOON):
        await request.cancelled.wait()


@pytest.mark.parametrize("name", ["request_id", "idempotency_key"])
async def test_a_call_that_ends_is_kept_until_it_is_cancelled(
    mesh: FakeMesh, http: httpx.AsyncClient, name: str
) -> None:
    original = inference_pb2.GenerateRequest(model=MODEL, text="a")
    async with mesh.inference() as stub:
        call = stub.Generate(original, metadata=(("idempotency-key", "k"),))
        request = await mesh.outputs.next_request()
        request.send("x", [1])
        first: Any = await call.read()
        call.cancel()
        await until_unattended(http)
        assert not request.cancelled.is_set()
        value = {"request_id": first.request_id, "idempotency_key": "k"}[name]
        await stub.Cancel(inference_pb2.InferenceCancelRequest(**{name: value}))
        async with asyncio.timeout(SOON):
            await request.cancelled.wait()


async def test_a_call_resumes_after_its_connection(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    original = inference_pb2.GenerateRequest(model=MODEL, text="a", resumable=True)
    async with mesh.inference() as stub:
        call = stub.Generate(original)
        request = await mesh.outputs.next_request()
        request.send("x", [1])
        first: Any = await call.read()
    await until_unattended(http)
    async with mesh.inference() as stub:
        resume = stub.Resume(inference_pb2.InferenceResumeRequest(request=original, request_id=first.request_id))
        again, _ = await mesh.outputs.next_resume()
        request.fail(errors.Aborted("The answer continues in another call."))
        again.answer("x", "y")
        assert "".join([response.text async for response in resume]) == "xy"


async def test_a_request_of_another_gateway_is_cancelled_at_the_output_processors(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        await stub.Cancel(inference_pb2.InferenceCancelRequest(request_id="ab" * 20))
    withdrawal = await mesh.outputs.next_withdrawal()
    assert (withdrawal.request_id, withdrawal.tenant) == ("ab" * 20, "")


async def test_a_malformed_cancellation(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        for request, field in (
            (inference_pb2.InferenceCancelRequest(), "request_id"),
            (inference_pb2.InferenceCancelRequest(request_id="x"), "request_id"),
            (inference_pb2.InferenceCancelRequest(idempotency_key="k" * 256), "idempotency_key"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Cancel(request)
            error = wire_errors.of_exception(caught.value)
            assert (error.reason, error.field) == ("INVALID_ARGUMENT", field)


async def test_a_position_of_an_output_that_no_answer_has_is_refused_at_once(mesh: FakeMesh) -> None:
    """A list of all positions before it took 3 s and 240 MB for number 30 million, in the event loop."""
    original = inference_pb2.GenerateRequest(model=MODEL, text="a", n=2**32 - 1)
    position = inference_pb2.OutputPosition(index=1_000_000)
    resume = inference_pb2.InferenceResumeRequest(request=original, request_id="ab" * 20, positions=[position])
    with pytest.raises(errors.InvalidArgument, match="n must be from 1 to"):
        read_resumption(resume)
    async with mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="n must be from 1 to"):
            await anext(aiter(stub.Resume(resume)))


@pytest.fixture
async def limited(socket_dir: Path) -> AsyncIterator[FakeMesh]:
    """A gateway whose tenants may have one output in work."""
    async with FakeMesh(socket_dir).gateway(tenant_live_outputs=1) as mesh:
        yield mesh


async def test_a_repeat_with_another_body_frees_no_place_of_the_request_that_runs_on(limited: FakeMesh) -> None:
    request, _ = await hang_up(limited, {"Idempotency-Key": "k"})
    async with limited.http() as http:
        await until_unattended(http)
        changed = {"model": MODEL, "prompt": "another"}
        for prompt in ("another", "x" * 1000):  # the second one would not fit the model either
            repeat = await http.post(PATH, json=changed | {"prompt": prompt}, headers={"Idempotency-Key": "k"})
            assert repeat.status_code == 422, repeat.text
        response = await http.post(PATH, json=changed)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded"), response.text
        request.finish()
        await until_unattended(http, 0)
        limited.outputs.auto = ("y",)
        assert (await http.post(PATH, json=changed)).status_code == 200


async def test_a_repeat_that_fails_gives_the_place_back(limited: FakeMesh) -> None:
    request, _ = await hang_up(limited, {"Idempotency-Key": "k"})
    async with limited.http() as http:
        await until_unattended(http)
        limited.tokenizer.error = limited.second_tokenizer.error = errors.ResourceExhausted("full")
        repeat = await http.post(PATH, content=BODY, headers={**JSON, "Idempotency-Key": "k"})
        assert repeat.status_code == 503, repeat.text
        limited.tokenizer.error = limited.second_tokenizer.error = None
        assert (await http.post(PATH, json={"model": MODEL, "prompt": "b"})).status_code == 429
        repeating = asyncio.create_task(http.post(PATH, content=BODY, headers={**JSON, "Idempotency-Key": "k"}))
        again = await limited.outputs.next_request()
        request.fail(errors.Aborted("The answer continues in another call."))
        again.answer("one")
        assert (await repeating).status_code == 200
        assert 'tokenloom_tenant_live_outputs{tenant=""} 0.0' in (await http.get("/metrics")).text


async def test_tokens_are_charged_once_however_often_the_answer_is_resumed(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    request, event = await hang_up(mesh, {"Last-Event-ID": "0"})
    await until_unattended(http)
    request.send(" two", [2, 3])
    last_id = event.split("\n")[0].removeprefix("id: ")
    headers = {**JSON, "Last-Event-ID": last_id}
    resuming = asyncio.create_task(http.post(PATH, content=BODY, headers=headers))
    again, _ = await mesh.outputs.next_resume()
    request.fail(errors.Aborted("The answer continues in another call."))
    again.send("one", [1])
    again.send(" two", [2, 3])
    again.send(" three", [4])
    again.finish()
    assert (await resuming).text.endswith("data: [DONE]\n\n")
    resuming = asyncio.create_task(http.post(PATH, content=BODY, headers=headers))  # once more, at its end
    again, _ = await mesh.outputs.next_resume()
    again.send("one two three", [1, 2, 3, 4])
    again.finish()
    assert (await resuming).text.endswith("data: [DONE]\n\n")
    page = (await http.get("/metrics")).text
    for line in (
        'tokenloom_tenant_tokens_total{tenant=""} 5.0',  # one of the prompt, four of the output
        'tokenloom_key_requests_total{key="",tenant=""} 1.0',
        'tokenloom_key_prompt_tokens_total{key="",tenant=""} 1.0',
        'tokenloom_key_output_tokens_total{key="",tenant=""} 4.0',
        'tokenloom_key_cached_tokens_total{key="",tenant=""} 1.0',
    ):
        assert line in page, [each for each in page.splitlines() if "tokenloom_key" in each or "tenant_tokens" in each]


async def test_an_answer_that_began_through_another_gateway_is_charged_from_where_it_broke(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    last_id = f"{'ab' * 20}.1.2-7"  # two tokens, seven characters
    resuming = asyncio.create_task(http.post(PATH, content=BODY, headers={**JSON, "Last-Event-ID": last_id}))
    again, _ = await mesh.outputs.next_resume()
    again.send("one two three", [1, 2, 3, 4, 5])
    again.finish()
    assert (await resuming).text.endswith("data: [DONE]\n\n")
    page = (await http.get("/metrics")).text
    assert 'tokenloom_tenant_tokens_total{tenant=""} 3.0' in page
    assert 'tokenloom_key_requests_total{key="",tenant=""} 0.0' in page


@pytest.mark.parametrize(("has", "tokens"), [("n3-2", "3.0"), ("n3-999999999", "2.0"), ("n1-999999999", "5.0")])
async def test_tokens_that_came_after_an_event_are_charged_whatever_its_id_says(
    mesh: FakeMesh, http: httpx.AsyncClient, has: str, tokens: str
) -> None:
    """A client that named more tokens than the answer has got the rest of it for nothing."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 64, "stream": True}
    headers = {"Last-Event-ID": f"{'ab' * 20}.1.{has}"}
    has_more = asyncio.Event()

    async def read() -> str:
        lines = []
        async with http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                if " two" in line:
                    has_more.set()
        return "".join(lines)

    reading = asyncio.create_task(read())
    again, _ = await mesh.outputs.next_resume()
    again.send("one two th", [1, 2, 3])
    await asyncio.wait_for(has_more.wait(), SOON)
    again.send("ree", [4, 5])
    again.finish()
    assert "message_stop" in await reading
    assert await charged(http) == tokens


async def charged(http: httpx.AsyncClient) -> str:
    """Return how many tokens the tenant was charged."""
    lines = (await http.get("/metrics")).text.splitlines()
    return next(line for line in lines if line.startswith("tokenloom_tenant_tokens_total{")).split()[-1]


async def test_a_key_that_is_used_again_when_its_answer_is_forgotten_is_charged_again(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    mesh.outputs.auto = ("one",)
    for seconds, tokens in ((0.0, "4.0"), (KEPT_SECONDS - 5, "4.0"), (KEPT_SECONDS + 5, "8.0")):
        pass_time(seconds)
        response = await http.post(PATH, content=WHOLE, headers={**JSON, "Idempotency-Key": "k"})
        assert response.status_code == 200, response.text
        assert await charged(http) == tokens


async def test_a_cancelled_key_is_charged_again(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ("one",)
    async with mesh.inference() as stub:
        for tokens in ("4.0", "8.0"):
            await http.post(PATH, content=WHOLE, headers={**JSON, "Idempotency-Key": "k"})
            assert await charged(http) == tokens
            await stub.Cancel(inference_pb2.InferenceCancelRequest(idempotency_key="k"))


async def test_a_position_that_no_answer_has_makes_no_later_one_free(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    request_id = id_of_key(NO_TENANT.name, "k")
    lie = asyncio.create_task(
        http.post(PATH, content=BODY, headers={**JSON, "Last-Event-ID": f"{request_id}.99999.9-9"})
    )
    await mesh.outputs.answers_unknown(lie)
    assert (await lie).status_code == 404
    mesh.outputs.auto = ("one",)
    await http.post(PATH, content=WHOLE, headers={**JSON, "Idempotency-Key": "k"})
    assert await charged(http) == "4.0"


async def test_a_request_without_a_seed_has_that_of_its_id(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    """The gateway that continues it draws the same: drawn anew, the rest would be that of another answer."""
    seeds = dict[str, set[int]]()
    for headers in ({}, {}, {"Last-Event-ID": "0"}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
        answer = asyncio.create_task(http.post(PATH, content=BODY, headers={**JSON, **headers}))
        request = await mesh.outputs.next_request()
        seeds.setdefault(str(headers), set()).add(request.submit.sampling_params.seed)
        assert (request.submit.sampling_params.seed == seed_of(request.submit.request_id)) == bool(headers)
        request.answer("one")
        await answer
    assert [len(each) for each in seeds.values()] == [2, 1, 1]
    chosen = asyncio.create_task(
        http.post(PATH, content=BODY.replace(b"{", b'{"seed": 7, ', 1), headers={**JSON, "Idempotency-Key": "other"})
    )
    request = await mesh.outputs.next_request()
    assert request.submit.sampling_params.seed == 7
    request.answer("one")
    await chosen
