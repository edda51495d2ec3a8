"""langchain-openai: a chat model, streamed and in batches, structured output, tools, the completions model, errors."""

import asyncio
import os
from collections.abc import Iterable
from typing import Any, Literal

import faults
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
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


@tool
def set_alarm(hour: int, sound: Literal["bell", "horn"]) -> str:
    """Sets it."""
    return f"{sound} at {hour}"


def with_tools(chat: ChatOpenAI) -> None:
    """A forced call, whole and streamed, run, and its result handed back."""
    forced = chat.bind_tools([set_alarm], tool_choice="set_alarm")
    asked = HumanMessage("Wake me.")
    said = forced.invoke([asked])
    (call,) = said.tool_calls
    result = set_alarm.invoke(call)
    assert isinstance(result, ToolMessage)
    streamed = sum_of(forced.stream([asked]))
    assert streamed.tool_calls[0]["args"] == call["args"]
    assert chat.bind_tools([set_alarm], tool_choice="none").invoke([asked, said, result]).content


def sum_of(chunks: Iterable[Any]) -> Any:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


def refuses(chat: ChatOpenAI) -> None:
    try:
        chat.invoke("x")
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
        return
    raise AssertionError("a temperature of -1 was taken")


def fail() -> str:
    def ask(fault: faults.Fault) -> object:
        own = {"base_url": f"{fault.url}/v1", "model": fault.model_name, "temperature": fault.temperature}
        return ChatOpenAI(**COMMON | own, timeout=fault.timeout).invoke(fault.text)

    expected = {
        faults.TOO_LONG: ContextOverflowError,
        faults.UNKNOWN_MODEL: openai.NotFoundError,
        faults.BAD_FIELD: openai.BadRequestError,
        faults.RATE_LIMIT: openai.RateLimitError,
        faults.NOT_SERVED: openai.InternalServerError,
        faults.TIMEOUT: openai.APITimeoutError,
    }
    return faults.recognised(ask, expected)


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
    with_tools(ChatOpenAI(**COMMON, max_tokens=200))
    told = ChatOpenAI(**COMMON, max_tokens=5, logprobs=True, top_logprobs=2).invoke("Hello").response_metadata
    assert len(told["logprobs"]["content"][0]["top_logprobs"]) == 2
    completions = OpenAI(**COMMON, max_tokens=5)
    assert "".join(completions.stream("Once upon")) == completions.invoke("Once upon")
    refuses(ChatOpenAI(**COMMON | {"temperature": -1}))
    done = "invoke, stream, abatch, structured output by schema and by tool, tools, logprobs, completions"
    print(f"{done}; {fail()}")


if __name__ == "__main__":
    main()
