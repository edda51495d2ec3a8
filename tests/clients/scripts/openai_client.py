"""The openai package: models, completions, chats, streams, samples, log probabilities, structured outputs, errors."""

import asyncio
import json
import os
from typing import Literal

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
    errors(client)
    asyncio.run(many())
    print("models, chats, streams, n, logprobs, parse, completions, errors, 16 at a time")


def errors(client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", json.dumps(error.body)
    else:
        raise AssertionError("a temperature of -1 was taken")
    try:
        client.chat.completions.create(model="other", messages=HELLO)
    except openai.NotFoundError:
        return
    raise AssertionError("another model was found")


async def many() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none") as client:
        asking = [
            client.completions.create(model=MODEL, prompt=f"{number}", max_tokens=10, temperature=0)
            for number in range(16)
        ]
        assert all(answer.choices[0].finish_reason for answer in await asyncio.gather(*asking))


if __name__ == "__main__":
    main()
