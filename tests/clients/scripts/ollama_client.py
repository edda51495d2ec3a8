"""The ollama package: models, chats, streams, schemas, thinking, errors, and a task with a tool to its end."""

import os

import ollama
import ollama_curl
import task

MODEL = os.environ["TOKENLOOM_MODEL"]
GREEDY = {"temperature": 0, "num_predict": 40}
QUESTION = [{"role": "user", "content": "What is a KV block?"}]


def main() -> None:
    client = ollama.Client(os.environ["TOKENLOOM_URL"])
    assert [each.model for each in client.list().models] == [MODEL]
    assert "completion" in client.show(MODEL).capabilities
    whole = client.chat(MODEL, QUESTION, options=GREEDY)
    assert whole.message.content
    assert whole.done_reason in ("stop", "length")
    pieces = client.chat(MODEL, QUESTION, options=GREEDY, stream=True)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert client.generate(MODEL, "What is a KV block?", options=GREEDY).response == whole.message.content
    formed = client.chat(MODEL, QUESTION, format=task.SCHEMA, options={"temperature": 0, "num_predict": 200})
    assert '"city"' in formed.message.content
    try:
        client.chat("other", QUESTION)
    except ollama.ResponseError as error:
        assert error.status_code == 404
    assert [each.model for each in client.ps().models] == [MODEL]
    ollama_curl.documentation()
    finish(ollama.Client(os.environ["SCRIPTED_URL"]))
    print("list, show, ps, chats, streams, generate, a schema, errors, the documentation's curl lines, a task")


def finish(client: ollama.Client) -> None:
    """The whole task: the model calls the tool by itself and reads its result."""
    model = os.environ["SCRIPTED_MODEL"]
    messages: list[object] = [{"role": "user", "content": task.QUESTION}]
    asked = client.chat(model, messages, tools=[task.get_weather]).message
    (call,) = asked.tool_calls
    result = task.get_weather(**call.function.arguments)
    messages += [asked, {"role": "tool", "tool_name": call.function.name, "content": result}]
    task.check(client.chat(model, messages, tools=[task.get_weather]).message.content)


if __name__ == "__main__":
    main()
