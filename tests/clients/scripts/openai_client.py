"""The openai package: chats, streams, samples, logprobs, parsed outputs, tools, completions, headers, errors."""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, MODEL = os.environ["TOKENLOOM_URL"] + "/v1", os.environ["TOKENLOOM_MODEL"]
HELLO = [{"role": "user", "content": "What is a KV block?"}]


class Answer(BaseModel):
    """What the model is made to fill in."""

    topic: Literal["memory", "time"]
    sure: bool


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none")
    assert [model.id for model in client.models.list()] == [MODEL]
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=40)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 40
    with client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        pieces, usage = [], None
        for chunk in chunks:
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage == whole.usage
    samples = client.chat.completions.create(
        model=MODEL, messages=HELLO, n=3, seed=1, max_completion_tokens=8, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in samples.choices] == [0, 1, 2]
    assert len(samples.choices[0].logprobs.content[0].top_logprobs) == 2
    parsed = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Answer, temperature=0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    text = client.completions.create(model=MODEL, prompt=["Once", "The"], max_tokens=5, logprobs=1, echo=True)
    assert [choice.text[:3] for choice in text.choices] == ["Onc", "The"]
    tools(client)
    extras(client)
    errors(client)
    asyncio.run(many())
    print(
        "models, chats, streams, n, logprobs, parse, tools, completions, headers, errors, 16 at a time, half left early"
    )


def tools(client: openai.OpenAI) -> None:
    """A forced call, whole and streamed, and the turn that follows its result."""
    tool = openai.pydantic_function_tool(Answer)
    asking = {"model": MODEL, "tools": [tool], "temperature": 0, "max_tokens": 200}
    forced = {"type": "function", "function": {"name": "Answer"}}
    whole = client.chat.completions.parse(messages=HELLO, tool_choice=forced, **asking).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Answer)
    with client.chat.completions.stream(messages=HELLO, tool_choice=forced, **asking) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds, kinds
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    said = whole.message.model_dump(include={"role", "content", "tool_calls"}, exclude={"tool_calls": {0: {"parsed"}}})
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is."}
    after = client.chat.completions.create(messages=[*HELLO, said, result], tool_choice="none", **asking)
    assert after.choices[0].message.content


def extras(client: openai.OpenAI) -> None:
    """What vLLM adds to the API, and what travels as headers."""
    assert client.models.retrieve(MODEL).id == MODEL
    raw = client.completions.with_raw_response.create(
        model=MODEL,
        prompt="Once upon",
        max_tokens=12,
        extra_body={"top_k": 1, "min_tokens": 12, "structured_outputs": {"regex": "[a-z ]{100}"}, "ignore_eos": True},
        extra_headers={"X-Request-Id": "the-clients-own"},
    )
    assert raw.headers["x-request-id"] == "the-clients-own"
    told = raw.parse()
    assert told._request_id == "the-clients-own"
    assert told.usage.completion_tokens == 12
    assert set(told.choices[0].text) <= set("abcdefghijklmnopqrstuvwxyz "), told.choices[0].text
    chunks = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=12, stream=True, temperature=0)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    whole = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=12, temperature=0)
    assert text == whole.choices[0].text


def errors(client: openai.OpenAI) -> None:
    refused(openai.BadRequestError, "temperature", lambda: ask(client, temperature=-1))
    refused(openai.BadRequestError, "max_tokens", lambda: ask(client, max_tokens=10**9))
    refused(openai.BadRequestError, "messages", lambda: ask(client, messages=[]))
    refused(openai.NotFoundError, "model", lambda: ask(client, model="other"))
    refused(openai.NotFoundError, "model", lambda: client.models.retrieve("other"))
    refused(openai.NotFoundError, None, lambda: client.files.list())


def ask(client: openai.OpenAI, **fields: Any) -> object:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})


def refused(kind: type[openai.APIStatusError], param: str | None, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert error.param == param, error.body
        assert error.request_id, error.response.headers
        return
    raise AssertionError(f"no {kind.__name__} of {param}")


async def many() -> None:
    """Half of them are left amid their streams."""
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as client:
        answers = await asyncio.gather(*(one(client, number) for number in range(16)))
    assert all(answers), answers


async def one(client: openai.AsyncOpenAI, number: int) -> bool:
    stream = await client.completions.create(
        model=MODEL, prompt=f"{number}", max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if number % 2 or chunk.choices[0].finish_reason == "length":
            await stream.close()
            return True
    return False


if __name__ == "__main__":
    main()
