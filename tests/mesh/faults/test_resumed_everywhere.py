"""A gateway is killed while it answers in the APIs beside chats: their clients go on at another one."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from tests.mesh.answers.test_beam_search import until_live
from tests.mesh.faults.test_killed_gateways import SLOW, TOOL, process
from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb2
from tokenloom.v1.kserve import grpc_service_pb2_grpc as kserve_pb2_grpc

FUNCTION = {"type": "function", "name": "set_alarm", "parameters": TOOL["function"]["parameters"]}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Once upon a time", "max_output_tokens": 90},
    "tools": {"input": "Wake me.", "tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 60},
}


@asynccontextmanager
async def two_gateways(
    directory: Path, **options: Any
) -> AsyncIterator[tuple[Mesh, httpx.AsyncClient, Callable[[], Awaitable[None]]]]:
    """A mesh with a gateway that stays; the HTTP client of another one; and what kills that one."""
    async with Mesh(directory, engine=SLOW, **options).running() as mesh, process(mesh, directory) as (victim, http):

        async def kill() -> None:
            os.kill(victim.pid, signal.SIGKILL)
            await victim.wait()

        yield mesh, http, kill


def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="a key", max_retries=0, http_client=http)


def shown(event: Any) -> tuple[Any, ...]:
    """What an event says, without what is drawn for each response."""
    item = getattr(event, "item", None)
    content = getattr(item, "arguments", None) or getattr(item, "content", None)
    return event.sequence_number, event.type, getattr(event, "delta", None), content and str(content)


async def read_until(stream: Any, enough: int, events: list[Any]) -> None:
    """Add events up to the one with this number."""
    async for event in stream:
        events.append(event)
        if event.sequence_number >= enough:
            return
    raise AssertionError("the response ended before its gateway")


@pytest.mark.parametrize("kind", RESPONSES)
async def test_a_stream_of_responses_goes_on_after_any_event(socket_dir: Path, kind: str) -> None:
    """With OpenAI's own client: it names the response and the number of its last event."""
    body: dict[str, Any] = {"model": MODEL, "background": True, "stream": True, **RESPONSES[kind]}
    body["extra_body"] = {"seed": 5, "ignore_eos": kind == "text"}
    async with two_gateways(socket_dir) as (mesh, https, kill), mesh.http() as http, asyncio.timeout(SOON):
        events: list[Any] = []
        await read_until(await openai_client(https).responses.create(**body), 6, events)
        await kill()
        client, response_id = openai_client(http), events[0].response.id
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
        events += [event async for event in rest]
        reference = [event async for event in await client.responses.create(**body)]
        assert [shown(event) for event in events] == [shown(event) for event in reference]
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert {event.response.id for event in (events[0], events[-1])} == {response_id}
        again = await client.responses.retrieve(response_id, stream=True)
        assert [event.to_dict() async for event in again] == [event.to_dict() for event in events]
        stored = await client.responses.retrieve(response_id)
        assert stored.output == events[-1].response.output
        await mesh.until_idle()


async def test_a_response_in_the_background_outlives_its_gateway(socket_dir: Path) -> None:
    body: dict[str, Any] = {"model": MODEL, "background": True, "input": "Once", "max_output_tokens": 60}
    body["extra_body"] = {"seed": 6, "ignore_eos": True}
    async with two_gateways(socket_dir) as (mesh, https, kill), mesh.http() as http, asyncio.timeout(SOON):
        begun = await openai_client(https).responses.create(**body)
        await mesh.until_running()
        client = openai_client(http)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"  # at the other gateway
        assert (await openai_client(https).responses.retrieve(begun.id)).status == "in_progress"
        await kill()
        response, reference = await ended(client, begun.id), await client.responses.create(**body)
        assert response.status == "incomplete"
        assert response.usage.output_tokens == 60
        assert response.output_text == (await ended(client, reference.id)).output_text
        cancelled = await client.responses.create(**body)
        await client.responses.cancel(cancelled.id)
        await mesh.until_idle()


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        pass
    return response


async def test_a_response_in_the_background_leaves_a_gateway_that_drains(socket_dir: Path) -> None:
    body: dict[str, Any] = {"model": MODEL, "background": True, "stream": True, **RESPONSES["text"]}
    body["extra_body"] = {"seed": 8, "ignore_eos": True}
    async with (
        Mesh(socket_dir, engine=SLOW).running() as mesh,
        process(mesh, socket_dir, "--drain", "migrate") as (victim, https),
        mesh.http() as http,
        asyncio.timeout(SOON),
    ):
        stream = aiter(await openai_client(https).responses.create(**body))
        events: list[Any] = []
        await read_until(stream, 6, events)
        victim.terminate()
        with pytest.raises(openai.APIError, match="shuts down"):
            await read_until(stream, 10_000, events)
        client, response_id = openai_client(http), events[0].response.id
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
        events += [event async for event in rest]
        reference = [event async for event in await client.responses.create(**body)]
        assert [shown(event) for event in events] == [shown(event) for event in reference]
        await mesh.until_idle()


async def test_a_stream_moves_to_the_gateway_that_is_asked_for_it(socket_dir: Path) -> None:
    """There and back, while both live."""
    body: dict[str, Any] = {"model": MODEL, "background": True, "stream": True, **RESPONSES["text"]}
    body["extra_body"] = {"seed": 9, "ignore_eos": True}
    async with two_gateways(socket_dir) as (mesh, https, _), mesh.http() as http, asyncio.timeout(SOON):
        there, here = openai_client(https), openai_client(http)
        events: list[Any] = []
        stream = aiter(await there.responses.create(**body))
        await read_until(stream, 4, events)
        response_id = events[0].response.id
        for number, client in enumerate((here, there, here), 2):
            before, at = stream, events[-1].sequence_number
            stream = aiter(await client.responses.retrieve(response_id, stream=True, starting_after=at))
            await read_until(stream, at + 4 * number, events)
            with pytest.raises(openai.APIError, match="continues in another call"):
                await read_until(before, 10_000, [])
        events += [event async for event in stream]
        reference = [event async for event in await here.responses.create(**body)]
        assert [shown(event) for event in events] == [shown(event) for event in reference]
        assert (await ended(there, response_id)).output == events[-1].response.output
        await mesh.until_idle()


async def test_a_response_is_cancelled_and_deleted_at_another_gateway(socket_dir: Path) -> None:
    body: dict[str, Any] = {"model": MODEL, "background": True, "input": "Once", "max_output_tokens": 400}
    body["extra_body"] = {"ignore_eos": True}
    async with two_gateways(socket_dir) as (mesh, https, _), mesh.http() as http, asyncio.timeout(SOON):
        there, here = openai_client(https), openai_client(http)
        for end in (here.responses.cancel, here.responses.delete):
            begun = await there.responses.create(**body)
            await mesh.until_running()
            await end(begun.id)
            await mesh.until_idle()


async def test_a_stream_of_responses_goes_on_after_an_output_processor_and_a_gateway(socket_dir: Path) -> None:
    body: dict[str, Any] = {"model": MODEL, "background": True, "stream": True, **RESPONSES["text"]}
    body["extra_body"] = {"seed": 7, "ignore_eos": True}
    async with (
        two_gateways(socket_dir, output_processors=2) as (mesh, https, kill),
        mesh.http() as http,
        asyncio.timeout(SOON),
    ):
        stream = aiter(await openai_client(https).responses.create(**body))
        events: list[Any] = []
        await read_until(stream, 6, events)
        (runs,) = [each for each in mesh.output_processors if num_live(each.service)]
        await runs.kill()
        await read_until(stream, events[-1].sequence_number + 6, events)
        await kill()
        client = openai_client(http)
        rest = await client.responses.retrieve(
            events[0].response.id, stream=True, starting_after=events[-1].sequence_number
        )
        events += [event async for event in rest]
        reference = [event async for event in await client.responses.create(**body)]
        assert [shown(event) for event in events] == [shown(event) for event in reference]
        await runs.start()
        await mesh.until_idle()


def num_live(service: Any) -> int:
    assert isinstance(service, OutputProcessorService)
    return service.requests.num_live


NUMBERED: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": ("/v1/responses", {"input": "Once", "max_output_tokens": 90}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 90}),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 90}}),
}


class Reader:
    """Reads the events of an answer with their ids, through several gateways if need be."""

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        own = {"temperature": 0, "ignore_eos": True}
        if "sampling_params" in fields:
            fields = fields | {"sampling_params": fields["sampling_params"] | own}
            own = {}
        self.path, self.body = path, json.dumps({"model": MODEL, "stream": True, **fields, **own}).encode()
        self.last_id = "0"
        self.events: list[dict[str, Any]] = []
        self.begun = asyncio.Event()

    async def read(self, http: httpx.AsyncClient) -> None:
        """Read to the end, or until the connection breaks."""
        headers = {"content-type": "application/json", "last-event-id": self.last_id}
        async with http.stream("POST", self.path, content=self.body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            block: dict[str, str] = {}
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    block[name] = value
                    continue
                if block["data"] != "[DONE]":
                    self.last_id = block["id"]
                    self.events.append(json.loads(block["data"]))
                if len(self.events) > 5:
                    self.begun.set()
                block = {}

    def said(self) -> list[Any]:
        """What the events say, without what is drawn for each answer."""
        if self.path == "/inference/v1/generate":
            choices = [choice for event in self.events for choice in event["choices"]]
            return [[token for choice in choices for token in choice["token_ids"]], choices[-1]["finish_reason"]]
        return [(event["type"], event.get("sequence_number"), event.get("delta")) for event in self.events]


async def test_streams_with_ids_go_on_after_any_event(socket_dir: Path) -> None:
    async with two_gateways(socket_dir) as (mesh, https, kill), mesh.http() as http, asyncio.timeout(SOON):
        readers = [Reader(*each) for each in NUMBERED.values()]
        cut = [asyncio.create_task(reader.read(https)) for reader in readers]
        await asyncio.gather(*(reader.begun.wait() for reader in readers))
        await kill()
        assert all(
            isinstance(each, httpx.TransportError) for each in await asyncio.gather(*cut, return_exceptions=True)
        )
        references = [Reader(*each) for each in NUMBERED.values()]
        await asyncio.gather(*(reader.read(http) for reader in (*readers, *references)))
        for reader, reference in zip(readers, references, strict=True):
            assert reader.said() == reference.said(), reader.path
        responses = [event["response"]["id"] for event in readers[0].events if "response" in event]
        assert len(responses) == 3
        assert len(set(responses)) == 1
        await mesh.until_idle()


async def test_a_beam_search_is_searched_again(socket_dir: Path) -> None:
    body = {"model": MODEL, "prompt": [1, 2, 3], "n": 3, "use_beam_search": True, "max_tokens": 30, "ignore_eos": True}
    ask = {"json": body | {"return_token_ids": True}, "headers": {"Idempotency-Key": "mine"}}
    async with two_gateways(socket_dir) as (mesh, https, kill), mesh.http() as http, asyncio.timeout(SOON):
        cut = asyncio.create_task(https.post("/v1/completions", **ask))
        await until_live(https, 3)
        await kill()
        with pytest.raises(httpx.TransportError):
            await cut
        repeated, reference = [(await http.post("/v1/completions", **ask)).json() for _ in range(2)]
        assert repeated["choices"] == reference["choices"]
        assert len({choice["text"] for choice in repeated["choices"]}) == 3
        assert repeated["id"] == reference["id"]
        del ask["headers"]
        assert (await http.post("/v1/completions", **ask)).json()["choices"] == reference["choices"]
        await mesh.until_idle()


def turn(token_ids: list[int], **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=types_pb2.TokenIds(ids=token_ids),
        sampling_params=types_pb2.SamplingParams(max_tokens=40, temperature=0.0),
        ignore_eos=True,
        resumable=True,
        **fields,
    )


class Turns:
    """What a session has said: the tokens of each turn, and where it stands in the last one."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[]]
        self.last: Any = None

    async def read(self, call: Any, num_tokens: int) -> None:
        """Read to the end, or until the present turn has so many tokens."""
        while (response := await call.read()) is not grpc.aio.EOF:
            assert response.token_index == len(self.tokens[-1]) or not response.token_ids
            self.tokens[-1] += response.token_ids
            self.last = response
            if response.finish_reason:
                self.tokens.append([])
            elif len(self.tokens) == 2 and len(self.tokens[-1]) >= num_tokens:
                return

    def position(self, *, finished: bool = False) -> inference_pb2.TurnPosition:
        tokens = self.tokens[-2] if finished else self.tokens[-1]
        has = inference_pb2.OutputPosition(num_tokens=len(tokens), text_length=self.last.text_length, finished=finished)
        return inference_pb2.TurnPosition(request_id=self.last.request_id, position=has)


@pytest.mark.parametrize("where", ["within a turn", "between turns"])
async def test_a_session_goes_on(socket_dir: Path, where: str) -> None:
    inputs = [[5, 6, 7], [8, 9], [10, 11, 12]]
    async with two_gateways(socket_dir) as (mesh, _, kill), asyncio.timeout(SOON):
        turns, num_sent = Turns(), 2 if where == "within a turn" else 1
        async with open_channel(f"unix:{socket_dir}/victim") as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
            for token_ids in inputs[:num_sent]:
                await call.write(turn(token_ids))
            if num_sent == 1:
                while len(turns.tokens) == 1:
                    response = await call.read()
                    turns.tokens[-1] += response.token_ids
                    turns.last = response
                    if response.finish_reason:
                        turns.tokens.append([])
            else:
                await turns.read(call, 10)
            await kill()
        async with ready_channel(mesh.gateway.settings.listen) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
            position = turns.position(finished=num_sent == 1)
            await call.write(turn(inputs[num_sent - 1], continued_turn=position))
            for token_ids in inputs[num_sent:]:
                await call.write(turn(token_ids))
            await call.done_writing()
            await turns.read(call, 1000)
        said: list[int] = []
        for token_ids, output in zip(inputs, turns.tokens, strict=False):
            said += token_ids
            assert output == mesh.expected(said, 40)
            said += output[:-1]
        assert len(turns.tokens) == 4
        await mesh.until_idle()


def infer(**parameters: Any) -> kserve_pb2.ModelInferRequest:
    request = kserve_pb2.ModelInferRequest(model_name=MODEL, id="a call of mine")
    for name, value in (("text_input", b"Once upon"), ("stream", True)):
        kind = "BYTES" if isinstance(value, bytes) else "BOOL"
        tensor = request.inputs.add(name=name, datatype=kind, shape=[1])
        (tensor.contents.bytes_contents if isinstance(value, bytes) else tensor.contents.bool_contents).append(value)
    for name, value in ({"ignore_eos": True, "max_tokens": 60, "n": 2, "seed": 4} | parameters).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


class Inferred:
    """What came of a stream of KServe's protocol."""

    def __init__(self) -> None:
        self.texts, self.reasons, self.last_id, self.num_tokens = ["", ""], ["", ""], "", 0

    async def read(self, channel: Any, num_responses: int, **parameters: Any) -> None:
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)

        async def requests() -> AsyncIterator[kserve_pb2.ModelInferRequest]:
            yield infer(**parameters)

        async for part in stub.ModelStreamInfer(requests()):
            assert not part.error_message, part.error_message
            self.add(part.infer_response)
            num_responses -= 1
            if not num_responses:
                return

    def add(self, response: kserve_pb2.ModelInferResponse) -> None:
        for output in response.outputs:
            index = output.parameters["index"].int64_param
            into = self.texts if output.name == "text_output" else self.reasons
            into[index] += output.contents.bytes_contents[0].decode()
        if "event_id" in response.parameters:
            self.last_id = response.parameters["event_id"].string_param
        if "completion_tokens" in response.parameters:
            self.num_tokens = response.parameters["completion_tokens"].int64_param


async def test_a_stream_of_kserves_protocol_goes_on(socket_dir: Path) -> None:
    async with two_gateways(socket_dir) as (mesh, _, kill), asyncio.timeout(SOON):
        cut, reference = Inferred(), Inferred()
        async with open_channel(f"unix:{socket_dir}/victim") as channel:
            await cut.read(channel, 15, resumable=True)
            await kill()
        assert re.fullmatch(r"[0-9a-f]{40}\..*", cut.last_id)
        async with ready_channel(mesh.gateway.settings.listen) as channel:
            await cut.read(channel, 10_000, resumable=True, last_event_id=cut.last_id)
            await reference.read(channel, 10_000)
        assert (cut.texts, cut.reasons, cut.num_tokens) == (reference.texts, reference.reasons, reference.num_tokens)
        assert (reference.reasons, reference.num_tokens, reference.last_id) == (["length", "length"], 120, "")
        await mesh.until_idle()
