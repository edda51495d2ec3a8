"""langchain-openai: a chat model, streamed and in batches, structured output, the completions model."""

import asyncio
import os
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

COMMON = {
    "base_url": os.environ["TOKENLOOM_URL"] + "/v1",
    "api_key": "none",
    "model": os.environ["TOKENLOOM_MODEL"],
    "temperature": 0,
    "max_retries": 0,
}


class Answer(BaseModel):
    """What the model is made to fill in."""

    topic: Literal["memory", "time"]
    sure: bool


async def at_once(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([f"What is {number}?" for number in range(4)])
    assert all(answer.content for answer in answers)


def main() -> None:
    chat = ChatOpenAI(**COMMON, max_tokens=40, stream_usage=True)
    whole = chat.invoke([("system", "Be brief."), ("human", "What is a KV block?")])
    assert whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(chat.stream([("system", "Be brief."), ("human", "What is a KV block?")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    asyncio.run(at_once(chat))
    with_schema = ChatOpenAI(**COMMON, max_tokens=200).with_structured_output(Answer, method="json_schema")
    assert isinstance(with_schema.invoke("What is a KV block?"), Answer)
    with_tool = ChatOpenAI(**COMMON, max_tokens=200).with_structured_output(Answer, method="function_calling")
    assert isinstance(with_tool.invoke("What is a KV block?"), Answer)
    assert OpenAI(**COMMON, max_tokens=5).invoke("Once upon")
    print("invoke, stream, abatch, structured output by schema and by tool, completions")


if __name__ == "__main__":
    main()
