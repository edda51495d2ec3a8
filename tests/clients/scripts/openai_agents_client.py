"""openai-agents: a task over chats and responses, and an agent whose forced call was cut by max_tokens goes on."""

import asyncio
import os

import task
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
get_weather = function_tool(task.get_weather)


def model(kind: type, prefix: str) -> object:
    client = AsyncOpenAI(base_url=os.environ[f"{prefix}_URL"] + "/v1", api_key="none", max_retries=0)
    return kind(model=os.environ[f"{prefix}_MODEL"], openai_client=client)


async def finish(kind: type) -> None:
    """The whole task, whole and streamed: the model calls the tool by itself and reads its result."""
    agent = Agent(name="weather", tools=[get_weather], model=model(kind, "SCRIPTED"))
    task.check((await Runner.run(agent, task.QUESTION)).final_output)
    streamed = Runner.run_streamed(agent, task.QUESTION)
    async for _ in streamed.stream_events():
        pass
    task.check(streamed.final_output)


async def go_on() -> None:
    """The arguments of the forced call are incomplete: the agent reports that to the model, and both go on."""
    num_cut = 0
    for limit in (4, 12, 16, 20, 24, 28, 32):
        settings = ModelSettings(tool_choice="required", max_tokens=limit, temperature=0)
        agent = Agent(name="weather", tools=[get_weather], model=model(MODELS[0], "TOKENLOOM"), model_settings=settings)
        try:
            result = await Runner.run(agent, task.QUESTION, max_turns=4)
        except ModelBehaviorError:  # what it makes of an answer that ends before the call's name
            continue
        calls = [item["arguments"] for item in result.to_input_list() if item.get("type") == "function_call"]
        num_cut += any(not arguments.endswith("}") for arguments in calls)
        history = [*result.to_input_list(), {"role": "user", "content": "And now?"}]
        await Runner.run(agent.clone(tools=[], model_settings=ModelSettings(max_tokens=12)), history, max_turns=2)
    assert num_cut, "no limit cut the arguments"


async def main() -> None:
    set_tracing_disabled(True)
    for kind in MODELS:
        await finish(kind)
    await go_on()  # with responses, the agent itself ends where an answer is incomplete
    print("chats and responses: a task whole and streamed; chats: a forced call that was cut")


if __name__ == "__main__":
    asyncio.run(main())
