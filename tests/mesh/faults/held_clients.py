"""Unmodified clients that read an answer, and say when it has begun."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import grpc.aio
import httpx
import openai

from tests.mesh.faults.test_killed_gateways import PARAMETERS, STREAMS, TOOL
from tests.mesh.harness import MODEL, SOON
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

MESSAGES: Any = [{"role": "user", "content": "Wake me."}]
TOOLS: Any = [TOOL]
TOKENS = 60


def openai_client(url: str, http: httpx.AsyncClient | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a key", max_retries=0, timeout=SOON, http_client=http)


def anthropic_client(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="a key", max_retries=0, timeout=SOON)


Read = Callable[[str, Callable[[], object]], Awaitable[object]]
"""Asks the gateway with a URL, calls the function when the answer has begun, and returns what the client got."""


async def read_chat(url: str, on_begun: Callable[[], object], http: httpx.AsyncClient | None = None) -> object:
    pieces, ids = [], set()
    async with openai_client(url, http) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=TOKENS,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for event in stream:
            ids.add((event.id, event.created))
            pieces += [choice.delta.content or "" for choice in event.choices]
            if len(pieces) == 5:
                on_begun()
    assert len(ids) == 1
    assert event.usage is not None
    return "".join(pieces), event.usage.completion_tokens


async def read_samples(url: str, on_begun: Callable[[], object]) -> object:
    choices: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    async with openai_client(url) as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt="Once upon a time",
            n=3,
            logprobs=2,
            max_tokens=TOKENS,
            seed=4,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for event in stream:
            for choice in event.choices:
                assert choice.logprobs is not None
                choices[choice.index].append((choice.text, choice.logprobs.tokens or [], choice.finish_reason))
            if len(choices[1]) == 4:
                on_begun()
    texts = {index: "".join(text for text, _, _ in parts) for index, parts in choices.items()}
    tokens = {index: [token for _, part, _ in parts for token in part] for index, parts in choices.items()}
    return texts, tokens, {index: parts[-1][2] for index, parts in choices.items()}


async def read_tools(url: str, on_begun: Callable[[], object]) -> object:
    names, arguments, reason, count = [], "", None, 0
    async with openai_client(url) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=TOKENS,
            seed=3,
            stream=True,
        )
        async for event in stream:
            for choice in event.choices:
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    names += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
                reason = choice.finish_reason or reason
            count += 1
            if count == 2:
                on_begun()
    return names, arguments, reason


async def read_messages(url: str, on_begun: Callable[[], object]) -> object:
    count = 0
    async with (
        anthropic_client(url) as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=TOKENS,
            messages=MESSAGES,
            extra_body={"seed": 5, "ignore_eos": True},
        ) as stream,
    ):
        async for event in stream:
            count += event.type == "text"
            if count == 5:
                on_begun()
        message = await stream.get_final_message()
    return message.content[0].text, message.stop_reason, message.usage.output_tokens  # type: ignore[union-attr]


_MORE: dict[str, Any] = {"seed": 9, "min_tokens": TOKENS}


async def read_response(url: str, on_begun: Callable[[], object], **options: Any) -> object:
    """Of the Responses API, whose events are numbered, and which repeats all of its text at its end."""
    events = []
    options = {"extra_body": _MORE, "max_output_tokens": TOKENS, **options}
    async with openai_client(url) as client:
        stream = await client.responses.create(model=MODEL, input="Wake me.", stream=True, **options)
        async for event in stream:
            events.append(event)
            if len(events) == 9:
                on_begun()
    return shown(events)


def shown(events: list[Any]) -> object:
    """What the events of a response say, which is the same however its text was cut into events."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = events[-1].response
    assert {event.response.id for event in events if hasattr(event, "response")} == {whole.id}
    assert whole.created_at == events[0].response.created_at
    parts: list[tuple[str, str]] = []
    for event in events:
        if hasattr(event, "delta"):
            assert whole.output[event.output_index].id == event.item_id
            parts.append((event.type, event.delta))
        elif event.type in ("response.output_text.done", "response.function_call_arguments.done"):
            said = getattr(event, "text", None) or event.arguments
            assert said == "".join(text for kind, text in parts if kind == event.type.replace("done", "delta"))
            item = whole.output[event.output_index]
            assert said == (item.arguments if item.type == "function_call" else item.content[0].text)
        elif event.type == "response.output_item.added" and event.item.type == "function_call":
            assert event.item.call_id == whole.output[event.output_index].call_id
    return [event.type for event in events if not hasattr(event, "delta")], texts_of(parts), whole.usage.output_tokens


def texts_of(parts: list[tuple[str, str]]) -> dict[str, str]:
    return {kind: "".join(text for each, text in parts if each == kind) for kind, _ in parts}


async def read_response_tools(url: str, on_begun: Callable[[], object]) -> object:
    function = {"type": "function", "strict": None, "name": "set_alarm", "parameters": PARAMETERS}
    return await read_response(url, on_begun, tools=[function], tool_choice="required", extra_body={"seed": 3})


async def read_large_response(url: str, on_begun: Callable[[], object]) -> object:
    """Whose first events, and the last one, repeat 50 KB of its request."""
    return await read_response(url, on_begun, metadata={"note": "kept " * 10_000})


async def read_background(url: str, on_begun: Callable[[], object]) -> object:
    return await read_response(url, on_begun, background=True)


async def read_whole(url: str, on_begun: Callable[[], object]) -> object:
    async with openai_client(url) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=TOKENS,
            seed=6,
            extra_body={"ignore_eos": True},
        )
        asked = asyncio.ensure_future(answer)
        on_begun()
        whole = await asked
    assert whole.usage is not None
    return whole.choices[0].message.content, whole.usage.completion_tokens


async def read_curl(url: str, on_begun: Callable[[], object]) -> object:
    """By a program that follows the framing of HTTP to the byte, and fails if it is broken."""
    path, fields = STREAMS["chat"]
    body = json.dumps({"model": MODEL, "stream": True, **fields, "max_tokens": TOKENS})
    flags = ("-N", "-s", "-S", "--fail", "-H", "content-type: application/json", "-d", body)
    curl = await asyncio.create_subprocess_exec("curl", *flags, f"{url}{path}", stdout=asyncio.subprocess.PIPE)
    assert curl.stdout is not None
    lines = []
    async for line in curl.stdout:
        lines.append(line)
        if len(lines) == 9:
            on_begun()
    assert await curl.wait() == 0
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2] if line != b"\n"]
    pieces = [choice["delta"].get("content", "") for event in events for choice in event["choices"]]
    return "".join(pieces), events[-1]["usage"]["completion_tokens"]


async def read_stub(address: str, on_begun: Callable[[], object]) -> object:
    """By a stub of gRPC as it is generated."""
    sampling = types_pb2.SamplingParams(max_tokens=TOKENS, seed=11)
    request = inference_pb2.GenerateRequest(text="Once", sampling_params=sampling, ignore_eos=True, n=2)
    texts, counts = ["", ""], [0, 0]
    async with grpc.aio.insecure_channel(address, [("grpc.default_authority", "localhost")]) as channel:
        async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            texts[response.index] += response.text
            counts[response.index] += len(response.token_ids)
            if min(counts) >= 5:
                on_begun()
    assert counts == [TOKENS, TOKENS]
    return texts
