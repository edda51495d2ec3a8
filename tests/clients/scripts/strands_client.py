"""strands-agents: a task with a tool over each dialect, history that outgrows the context, errors.

Where it recognises a context that is too long, its conversation manager drops old turns and goes on.
"""

import asyncio
import os
from typing import Any

import anthropic
import faults
import httpx
import ollama
import openai
import task
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager, SlidingWindowConversationManager
from strands.models import Model
from strands.models.anthropic import AnthropicModel
from strands.models.ollama import OllamaModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel
from strands.types.exceptions import (
    ContextWindowOverflowException,
    MaxTokensReachedException,
    ModelThrottledException,
)

get_weather = tool(task.get_weather)


def chats(url: str, name: str, timeout: float = 60.0, **params: Any) -> Model:
    client = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": timeout}
    return OpenAIModel(client_args=client, model_id=name, params=params)


def responses(url: str, name: str, timeout: float = 60.0, **params: Any) -> Model:
    client = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": timeout}
    if "max_tokens" in params:
        params["max_output_tokens"] = params.pop("max_tokens")
    return OpenAIResponsesModel(client_args=client, model_id=name, params=params)


def messages(url: str, name: str, timeout: float = 60.0, max_tokens: int = 64, **params: Any) -> Model:
    client = {"base_url": url, "api_key": "none", "max_retries": 0, "timeout": timeout}
    return AnthropicModel(client_args=client, model_id=name, max_tokens=max_tokens, params=params)


def of_ollama(url: str, name: str, timeout: float = 60.0, max_tokens: int = 64, **params: Any) -> Model:
    return OllamaModel(url, ollama_client_args={"timeout": timeout}, model_id=name, max_tokens=max_tokens, **params)


def agent(model: Model, **options: Any) -> Agent:
    return Agent(model, callback_handler=None, retry_strategy=None, **options)


async def finish(model: Model) -> None:
    """In one event loop: the agent keeps one client of Anthropic's, whose connections belong to a loop."""
    ours = agent(model, tools=[get_weather])
    task.check(str(await ours.invoke_async(task.QUESTION)))
    task.check(
        str(await ours.invoke_async("And tomorrow? " + task.QUESTION))
    )  # with the call and its result as history


def outgrow(model: Model) -> None:
    """Twenty-four turns do not fit: the agent drops the oldest, and answers."""
    history = []
    for number in range(12):
        history.append({"role": "user", "content": [{"text": f"{number} " + "word " * 200}]})
        history.append({"role": "assistant", "content": [{"text": "I see."}]})
    ours = agent(model, messages=history, conversation_manager=SlidingWindowConversationManager())
    try:
        ours("And now?")
    except MaxTokensReachedException:  # it takes an answer that max_tokens ends for an error
        assert ours.messages[-1]["role"] == "assistant"
    assert len(ours.messages) < 24, "no turn was dropped"


def fail(make: Any, theirs: dict[faults.Fault, faults.Expected]) -> str:
    """Its own error of the context, and those of the SDK below it."""

    def ask(fault: faults.Fault) -> object:
        model = make(fault.url, fault.model_name, timeout=fault.timeout, temperature=fault.temperature)
        return agent(model, conversation_manager=NullConversationManager())(fault.text)

    return faults.recognised(ask, {faults.TOO_LONG: ContextWindowOverflowException, **theirs})


def of_sdk(sdk: Any) -> dict[faults.Fault, faults.Expected]:
    return {
        faults.RATE_LIMIT: ModelThrottledException,
        faults.UNKNOWN_MODEL: sdk.NotFoundError,
        faults.BAD_FIELD: sdk.BadRequestError,
        faults.NOT_SERVED: sdk.InternalServerError,
        faults.TIMEOUT: sdk.APITimeoutError,
    }


def with_status(status: int) -> faults.Expected:
    return lambda error: isinstance(error, ollama.ResponseError) and error.status_code == status


OF_OLLAMA = {
    faults.RATE_LIMIT: with_status(429),
    faults.UNKNOWN_MODEL: with_status(404),
    faults.BAD_FIELD: with_status(400),
    faults.NOT_SERVED: with_status(503),
    faults.TIMEOUT: httpx.TimeoutException,
}


def main() -> None:
    for make in (chats, responses, messages, of_ollama):
        asyncio.run(finish(make(os.environ["SCRIPTED_URL"], os.environ["SCRIPTED_MODEL"])))
        outgrow(make(os.environ["TOKENLOOM_URL"], os.environ["TOKENLOOM_MODEL"], max_tokens=16))
        print(make.__name__, flush=True)
    said = {fail(chats, of_sdk(openai)), fail(responses, of_sdk(openai)), fail(messages, of_sdk(anthropic))}
    said.add(fail(of_ollama, OF_OLLAMA))
    print(f"chats, responses, messages, Ollama: a task, history that outgrows the context; {', '.join(said)}")


if __name__ == "__main__":
    main()
