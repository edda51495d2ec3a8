"""Let a model call a function of this program over gRPC. Run ``tokenloom serve`` first."""

import argparse
import json

from tokenloom.client import Client, Message

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "temperature": 21, "condition": "sunny"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:9000")
    parser.add_argument("prompt", nargs="?", default="What is the weather in Oslo?")
    args = parser.parse_args()
    messages: list[Message] = [{"role": "user", "content": args.prompt}]
    with Client(args.address, timeout=60) as client:
        answer = client.chat(messages, tools=TOOLS, tool_choice="auto", temperature=0, max_tokens=200)
        messages.append(answer.message)
        for call in answer.tool_calls:
            print(f"called: {call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            messages.append({"role": "tool", "content": result, "tool_call_id": call.id})
        if answer.tool_calls:
            answer = client.chat(messages, tools=TOOLS, temperature=0, max_tokens=200)
        print(answer.text)


if __name__ == "__main__":
    main()
