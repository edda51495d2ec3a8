"""pydantic-ai: a task with a tool over chats, responses and messages, history with a cut call, errors."""

import asyncio
import os

import anthropic
import faults
import openai
import task
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel)


def model(kind: type, url: str, name: str) -> Model:
    if kind is AnthropicModel:
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return kind(name, provider=OpenAIProvider(openai_client=client))


async def finish(kind: type) -> None:
    agent = Agent(model(kind, os.environ["SCRIPTED_URL"], os.environ["SCRIPTED_MODEL"]), tools=[task.get_weather])
    result = await agent.run(task.QUESTION)
    task.check(result.output)
    async with agent.run_stream(task.QUESTION, message_history=result.all_messages()) as streamed:
        task.check(await streamed.get_output())


async def go_on(kind: type) -> None:
    """A call whose arguments were cut, and what the agent made of it, are history like others."""
    history = [
        ModelRequest([UserPromptPart(task.QUESTION)]),
        ModelResponse([ToolCallPart(task.NAME, '{"city": "Os', "call_1")]),
        ModelRequest([ToolReturnPart(task.NAME, "The arguments are no JSON.", "call_1")]),
    ]
    agent = Agent(model(kind, os.environ["TOKENLOOM_URL"], os.environ["TOKENLOOM_MODEL"]))
    result = await agent.run("And now?", message_history=history, model_settings={"max_tokens": 16})
    assert result.output


def fail(kind: type) -> str:
    def ask(fault: faults.Fault) -> object:
        agent = Agent(model(kind, fault.url, fault.model_name), retries=0)
        settings = {"temperature": fault.temperature, "timeout": fault.timeout, "max_tokens": 16}
        return asyncio.run(agent.run(fault.text, model_settings=settings))

    def with_status(status: int, words: str = "") -> faults.Expected:
        return lambda error: (
            isinstance(error, ModelHTTPError) and error.status_code == status and words in str(error.body)
        )

    long = "prompt is too long" if kind is AnthropicModel else "context_length_exceeded"
    return faults.recognised(
        ask,
        {
            faults.TOO_LONG: with_status(400, long),
            faults.UNKNOWN_MODEL: with_status(404),
            faults.BAD_FIELD: with_status(400, "temperature"),
            faults.RATE_LIMIT: with_status(429),
            faults.NOT_SERVED: with_status(503),
            faults.TIMEOUT: lambda error: "timed out" in str(error),
        },
    )


async def sessions() -> None:
    for kind in KINDS:
        await finish(kind)
        await go_on(kind)


def main() -> None:
    asyncio.run(sessions())
    said = sorted({fail(kind) for kind in KINDS})
    print(f"chats, responses, messages: a task with a tool, history with a cut call; {', '.join(said)}")


if __name__ == "__main__":
    main()
