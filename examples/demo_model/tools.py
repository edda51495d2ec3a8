"""Make conversations with tools: a schema in the system turn, a call, a result, and an answer in words."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .facts import CITIES, LANGUAGES
from .grammar import expand
from .questions import any_name, made_word
from .stories import THINGS

Document = dict[str, Any]
"""``{"kind", "messages", "tools"?}`` for a chat, ``{"kind", "text"}`` for plain text."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `{placeholders}` are its arguments and the values of its result."""

    names: tuple[str, ...]
    description: str
    parameters: Mapping[str, tuple[tuple[str, ...], str, str]]
    """Argument → (names it goes by, JSON type, description)."""
    asks: str
    answer: str
    arguments: Callable[[random.Random], dict[str, Any]]
    result: Callable[[random.Random], dict[str, Any]]


def _city(rng: random.Random) -> dict[str, Any]:
    return {"city": rng.choice(CITIES) if rng.random() < 0.4 else made_word(rng).capitalize()}


_CITY = {"city": (("city", "city", "location", "place"), "string", "The name of the city")}
TOOLS = {
    "weather": Tool(
        ("get_weather", "get_weather", "get_current_weather"),
        "Get the current weather of a city.",
        _CITY,
        "[What is the weather in {city}?|How is the weather in {city} today?|What's the weather like in {city}?|"
        "Weather in {city}, please.|Tell me the weather in {city}.|Is it raining in {city}?|"
        "Is it warm in {city} right now?]",
        "It is {condition} in {city} and the temperature is {temperature} degrees.",
        _city,
        lambda rng: {
            "temperature": rng.randint(-9, 38),
            "condition": rng.choice("sunny rainy cloudy windy snowy foggy".split()),
        },
    ),
    "time": Tool(
        ("get_time", "get_local_time"),
        "Get the local time of a city.",
        _CITY,
        "[What time is it in {city}?|Tell me the time in {city}.|What is the time in {city} now?|"
        "Time in {city}, please.]",
        "It is {time} in {city}.",
        _city,
        lambda rng: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
    ),
    "hotel": Tool(
        ("find_hotel", "search_hotel"),
        "Find a hotel in a city.",
        _CITY,
        "[Find a hotel in {city}.|I need a hotel in {city}.|Where can I sleep in {city}?|Book me a room in {city}.]",
        "You can stay at {hotel} in {city} for {price} a night.",
        _city,
        lambda rng: {"hotel": "Hotel " + any_name(rng), "price": rng.randint(40, 200)},
    ),
    "timer": Tool(
        ("set_timer", "start_timer"),
        "Set a timer.",
        {"minutes": (("minutes",), "integer", "How many minutes")},
        "[Set a timer for {minutes} minutes.|Wake me in {minutes} minutes.|Please start a timer of {minutes} minutes.]",
        "The timer is set to {minutes} minutes.",
        lambda rng: {"minutes": rng.randint(2, 99)},
        lambda rng: {"status": "started"},
    ),
    "translate": Tool(
        ("translate", "translate_word"),
        "Translate a word into another language.",
        {
            "word": (("word", "text"), "string", "The word"),
            "language": (("language",), "string", "The language"),
        },
        '[Translate "{word}" into {language}.|How do you say "{word}" in {language}?|What is "{word}" in {language}?]',
        'In {language} it is "{translation}".',
        lambda rng: {"word": rng.choice(THINGS), "language": rng.choice(LANGUAGES)},
        lambda rng: {"translation": made_word(rng)},
    ),
}


def user(text: str) -> Document:
    return {"role": "user", "content": text}


def assistant(text: str) -> Document:
    return {"role": "assistant", "content": text}


def schema(tool: Tool, name: str, spelling: dict[str, str]) -> Document:
    """The tool as OpenAI's `tools` field has it, its arguments under the names of `spelling`."""
    properties = {spelling[a]: {"type": kind, "description": about} for a, (_, kind, about) in tool.parameters.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": tool.description, "parameters": parameters},
    }


def offered(rng: random.Random, keys: list[str]) -> dict[str, tuple[Document, str, dict[str, str]]]:
    """For each tool: its schema, the name it goes by here, and the spelling of its arguments."""
    chosen = {}
    for key in keys:
        tool = TOOLS[key]
        name, spelling = rng.choice(tool.names), {a: rng.choice(names) for a, (names, _, _) in tool.parameters.items()}
        chosen[key] = schema(tool, name, spelling), name, spelling
    return chosen


def tool_chat(rng: random.Random, kind: str | None = None, **fixed: str) -> Document:
    """A chat of `kind` ``tool_call``, ``tool_answer`` or ``no_tool``; `fixed` sets the city."""
    kind = kind or rng.choices(["tool_call", "tool_answer", "no_tool"], [5, 3, 4])[0]
    key = "weather" if fixed else rng.choice(["weather", *TOOLS])
    tool, values = TOOLS[key], TOOLS[key].arguments(rng) | fixed
    others = [other for other in TOOLS if other != key and rng.random() < (0.35 if kind == "no_tool" else 0.2)]
    keys = others if kind == "no_tool" else [key, *others]
    given = offered(rng, rng.sample(keys, len(keys)))
    asked = expand(tool.asks, rng, **{a: str(v) for a, v in values.items()})
    document: Document = {"kind": kind, "messages": [user(asked)], "tools": [item[0] for item in given.values()]}
    if kind == "no_tool":
        document["messages"].append(assistant("I am sorry, I have no tool for that."))
        return document
    _, name, spelling = given[key]
    call = {"name": name, "arguments": {spelling[a]: v for a, v in values.items()}}
    document["messages"].append(
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    )
    if kind == "tool_answer":
        result = tool.result(rng)
        document["messages"] += [
            {"role": "tool", "content": json.dumps(result)},
            assistant(tool.answer.format(**values, **result)),
        ]
    return document
