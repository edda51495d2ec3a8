"""agno: a task with a tool to its end, and a conversation that goes on after a call that max_tokens has cut."""

import os

import task
from agno.agent import Agent
from agno.models.message import Message
from agno.models.openai.like import OpenAILike


def model(prefix: str, **options: object) -> OpenAILike:
    url = os.environ[f"{prefix}_URL"] + "/v1"
    return OpenAILike(id=os.environ[f"{prefix}_MODEL"], base_url=url, api_key="none", max_retries=0, **options)


def finish() -> None:
    agent = Agent(model=model("SCRIPTED"), tools=[task.get_weather], telemetry=False)
    task.check(agent.run(task.QUESTION).content)
    task.check("".join(event.content or "" for event in agent.run(task.QUESTION, stream=True) if event.content))


def go_on() -> None:
    """An agent sends back a call whose arguments max_tokens has cut, with what it made of it."""
    function = {"name": task.NAME, "arguments": '{"city": "Os'}
    turns = [
        Message(role="user", content=task.QUESTION),
        Message(role="assistant", tool_calls=[{"id": "call_1", "type": "function", "function": function}]),
        Message(role="tool", tool_call_id="call_1", content="The arguments are no JSON."),
        Message(role="user", content="And now?"),
    ]
    run = Agent(model=model("TOKENLOOM", max_tokens=12), telemetry=False).run(turns)
    assert run.status.value == "COMPLETED", run.content
    assert run.content


if __name__ == "__main__":
    finish()
    go_on()
    print("a task with a tool, whole and streamed; history with a call that was cut")
