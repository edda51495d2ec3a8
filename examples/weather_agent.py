"""Let an agent call a function through a mesh. Run ``pip install openai-agents`` and ``tokenloom serve`` first."""

import argparse
import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    print(f"called: get_weather({city!r})")
    return '{"temperature": 21, "condition": "sunny"}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="tokenloom-demo")
    parser.add_argument("question", nargs="?", default="How is the weather in Havana today?")
    args = parser.parse_args()
    set_tracing_disabled(True)  # traces would go to OpenAI
    client = AsyncOpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = OpenAIChatCompletionsModel(model=args.model, openai_client=client)
    agent = Agent(name="weather", model=model, tools=[get_weather])
    print(Runner.run_sync(agent, args.question).final_output)


if __name__ == "__main__":
    main()
