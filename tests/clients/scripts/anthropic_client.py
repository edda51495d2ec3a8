"""The anthropic package: messages, streams, a tool called and its result, a begun answer, token counts, errors."""

import os
from collections.abc import Callable
from typing import Any

import anthropic
import task

MODEL = os.environ["TOKENLOOM_MODEL"]
ASKING: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
QUESTION = {"role": "user", "content": "What is a KV block?"}
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
TOOL = {"name": "answer", "description": "Answers.", "input_schema": SCHEMA}


def main() -> None:
    client = anthropic.Anthropic(base_url=os.environ["TOKENLOOM_URL"], api_key="none")
    whole = client.messages.create(messages=[QUESTION], **ASKING)
    (text,) = whole.content
    assert text.text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(messages=[QUESTION], **ASKING) as stream:
        assert "".join(stream.text_stream) == text.text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    count = client.messages.count_tokens(model=MODEL, messages=[QUESTION]).input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    begun = client.messages.create(messages=[QUESTION, {"role": "assistant", "content": "A KV block"}], **ASKING)
    assert begun.content[0].text
    tools(client)
    errors(client)
    finish(anthropic.Anthropic(base_url=os.environ["SCRIPTED_URL"], api_key="none"))
    print("messages, streams, a tool and its result, a begun answer, count_tokens, errors, a task")


def tools(client: anthropic.Anthropic) -> None:
    """A forced call, whole and streamed, and the turn that follows its result."""
    forced = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "answer"}}
    asked = client.messages.create(messages=[QUESTION], **forced, **ASKING)
    (call,) = asked.content
    assert asked.stop_reason == "tool_use"
    assert isinstance(call.input["sure"], bool)
    with client.messages.stream(messages=[QUESTION], **forced, **ASKING) as stream:
        assert stream.get_final_message().content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is."}
    turns = [QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, tools=[TOOL], tool_choice={"type": "none"}, **ASKING)
    assert after.content[0].text


def finish(client: anthropic.Anthropic) -> None:
    """A whole task: the package calls the tool by itself, until the model has read its result."""
    asking: dict[str, Any] = {"model": os.environ["SCRIPTED_MODEL"], "max_tokens": 200}
    question = {"role": "user", "content": task.QUESTION}
    tools = [{"name": task.NAME, "input_schema": task.SCHEMA, "strict": True}]
    with client.messages.stream(messages=[question], tools=tools, **asking) as stream:
        asked = stream.get_final_message()
    assert asked.stop_reason == "tool_use"
    call = asked.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": task.get_weather(**call.input)}
    turns = [question, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    task.check(client.messages.create(messages=turns, tools=tools, **asking).content[0].text)


def errors(client: anthropic.Anthropic) -> None:
    refused(anthropic.BadRequestError, "max_tokens", lambda: ask(client, max_tokens=0))
    refused(anthropic.BadRequestError, "messages", lambda: ask(client, messages=[]))
    refused(anthropic.NotFoundError, "other", lambda: ask(client, model="other"))


def ask(client: anthropic.Anthropic, **fields: Any) -> object:
    return client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": [QUESTION], **fields})


def refused(kind: type[anthropic.APIStatusError], word: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        assert word in error.body["error"]["message"], error.body
        return
    raise AssertionError(f"no {kind.__name__} about {word}")


if __name__ == "__main__":
    main()
