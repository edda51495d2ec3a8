"""The openai package's Responses API: whole and streamed, a conversation, tools, schemas, background, errors."""

import json
import os
import time
from typing import Any, Literal

import openai
import task
from pydantic import BaseModel

URL, MODEL = os.environ["TOKENLOOM_URL"] + "/v1", os.environ["TOKENLOOM_MODEL"]
ASKING: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
QUESTION = "What is a KV block?"


class Answer(BaseModel):
    """What the model is made to fill in."""

    topic: Literal["memory", "time"]
    sure: bool


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key="none")
    whole = client.responses.create(input=QUESTION, **ASKING)
    assert whole.output_text
    with client.responses.stream(input=QUESTION, **ASKING) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text
    after = client.responses.create(input="And more?", previous_response_id=whole.id, **ASKING)
    assert after.usage.input_tokens > whole.usage.total_tokens
    parsed = client.responses.parse(input=QUESTION, text_format=Answer, **ASKING)
    assert isinstance(parsed.output_parsed, Answer)
    tools(client)
    background(client)
    client.responses.delete(whole.id)
    finish(openai.OpenAI(base_url=os.environ["SCRIPTED_URL"] + "/v1", api_key="none"))
    try:
        client.responses.retrieve(whole.id)
    except openai.NotFoundError:
        print(
            "responses, streams, previous_response_id, parse, a tool and its result, background, delete, errors, a task"
        )


def tools(client: openai.OpenAI) -> None:
    """A forced call, and the turn that follows its result."""
    tool = openai.pydantic_function_tool(Answer)["function"] | {"type": "function"}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    asked = client.responses.create(input=QUESTION, **forced, **ASKING)
    assert asked.status == "completed", asked
    (call,) = asked.output
    Answer.model_validate_json(call.arguments)
    turns = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in asked.output)]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "It is."})
    assert client.responses.create(input=turns, tools=[tool], tool_choice="none", **ASKING).output_text


def finish(client: openai.OpenAI) -> None:
    """A whole task: the model calls the tool by itself and reads its result."""
    function = {"type": "function", "name": task.NAME, "parameters": task.SCHEMA, "strict": True}
    asking: dict[str, Any] = {"model": os.environ["SCRIPTED_MODEL"], "tools": [function]}
    with client.responses.stream(input=task.QUESTION, **asking) as stream:
        asked = stream.get_final_response()
    (call,) = (item for item in asked.output if item.type == "function_call")
    result = task.get_weather(**json.loads(call.arguments))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    task.check(client.responses.create(input=[output], previous_response_id=asked.id, **asking).output_text)


def background(client: openai.OpenAI) -> None:
    response = client.responses.create(input=QUESTION, background=True, **ASKING)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert response.status == "completed", response
    assert response.output_text


if __name__ == "__main__":
    main()
