"""Chats of the public gRPC API, read as those that come over HTTP."""

import json
from typing import Any

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.formats.tool_request import ToolChoice
from tokenloom.services.gateway.grpc.chat_prompt import read_chat_prompt
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import types_pb2

USER = pb.ChatMessage(role="user", content="hi")
WEATHER = '{"type": "object", "properties": {"z": {}, "a": {}}}'
TOOLS = [
    pb.Tool(function=pb.Function(name="get_weather", description="It.", parameters=WEATHER)),
    pb.Tool(function=pb.Function(name="get_time")),
]


def test_a_conversation_with_calls_and_results() -> None:
    call = pb.ToolCall(id="c1", function=pb.FunctionCall(name="get_time", arguments='{"a": [1]}'))
    messages = [
        USER,
        pb.ChatMessage(role="assistant", tool_calls=[call], reasoning="Hm."),
        pb.ChatMessage(role="tool", content="noon", tool_call_id="c1", name="get_time"),
    ]
    chat, request = read_chat_prompt(pb.ChatPrompt(messages=messages, tools=TOOLS))
    user, assistant, tool = json.loads(chat.messages_json)
    assert user == {"role": "user", "content": "hi"}
    function = {"name": "get_time", "arguments": {"a": [1]}}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert (assistant["content"], assistant["reasoning_content"]) == ("", "Hm.")
    assert tool == {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "get_time"}
    assert request.choice is ToolChoice.AUTO
    assert request.parallel


def test_a_past_call_that_was_cut_is_taken_as_it_is() -> None:
    call = pb.ToolCall(function=pb.FunctionCall(name="f", arguments='{"a": "Par'))
    chat, _ = read_chat_prompt(pb.ChatPrompt(messages=[USER, pb.ChatMessage(role="assistant", tool_calls=[call])]))
    assert json.loads(chat.messages_json)[1]["tool_calls"][0]["function"]["arguments"] == '{"a": "Par'


def test_tools_reach_the_template_as_over_http() -> None:
    chat, _ = read_chat_prompt(pb.ChatPrompt(messages=[USER], tools=TOOLS))
    first, second = json.loads(chat.tools_json)
    assert first["function"] == {"name": "get_weather", "description": "It.", "parameters": json.loads(WEATHER)}
    assert list(first["function"]["parameters"]["properties"]) == ["z", "a"]
    assert second == {"type": "function", "function": {"name": "get_time"}}
    assert read_chat_prompt(pb.ChatPrompt(messages=[USER]))[0].tools_json == b""


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice.AUTO),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE), ToolChoice.NONE),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO), ToolChoice.AUTO),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED), ToolChoice.REQUIRED),
        (pb.ToolChoice(function="get_time"), ToolChoice.NAMED),
    ],
)
def test_every_choice(choice: pb.ToolChoice | None, expected: ToolChoice) -> None:
    _, request = read_chat_prompt(
        pb.ChatPrompt(messages=[USER], tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    )
    assert request.choice is expected
    assert (request.named.name if request.named else None) == ("get_time" if expected is ToolChoice.NAMED else None)
    assert expected is ToolChoice.NONE or not request.parallel


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tools": [pb.Tool()]}, "tools[0].function.name"),
        ({"tools": [pb.Tool(function=pb.Function(name="f", parameters="{"))]}, "tools[0].function.parameters"),
        ({"tools": [pb.Tool(function=pb.Function(name="f", parameters="5"))]}, "tools[0].function.parameters"),
        (
            {"tools": [pb.Tool(function=pb.Function(name="f", parameters=r'{"title": "\ud83d"}'))]},
            "tools[0].function.parameters",
        ),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice()}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": pb.ToolChoice(function="other")}, "tool_choice"),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)}, "tool_choice"),
        ({"messages": []}, "chat.messages"),
        ({"messages": [pb.ChatMessage(role="robot")]}, "chat.messages[0].role"),
        ({"messages": [pb.ChatMessage(role="user", tool_calls=[pb.ToolCall()])]}, "chat.messages[0].tool_calls"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_chat_prompt(pb.ChatPrompt(**{"messages": [USER], **fields}))
    assert caught.value.field == word
    assert word.split("[")[0] in caught.value.message


def test_template_variables_keep_their_whole_numbers() -> None:
    chat = pb.ChatPrompt(messages=[USER])
    chat.template_kwargs.update({"depth": 3, "rate": 0.5, "names": ["a", 2]})
    assert json.loads(read_chat_prompt(chat)[0].template_kwargs_json) == {"depth": 3, "rate": 0.5, "names": ["a", 2]}


def test_parts_are_texts_and_images() -> None:
    parts = [pb.ContentPart(text="What is"), pb.ContentPart(image=b"an image"), pb.ContentPart(image_url="https://a/b")]
    chat, _ = read_chat_prompt(pb.ChatPrompt(messages=[USER, pb.ChatMessage(role="user", parts=parts)]))
    said = json.loads(chat.messages_json)[1]["content"]
    assert said == [{"type": "text", "text": "What is"}, {"type": "image"}, {"type": "image"}]
    first, second = chat.media
    assert first.file is not None
    assert (b"".join(first.file.pieces), first.field) == (b"an image", "chat.messages[1].parts[1].image")
    assert (second.url, second.field) == ("https://a/b", "chat.messages[1].parts[2].image_url")


def test_parts_may_be_sounds() -> None:
    parts = [pb.ContentPart(audio=b"a sound"), pb.ContentPart(audio_url="https://a/b.wav")]
    chat, _ = read_chat_prompt(pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)]))
    assert json.loads(chat.messages_json)[0]["content"] == [{"type": "audio", "audio": ""}] * 2
    first, second = chat.media
    assert first.file is not None
    assert (b"".join(first.file.pieces), first.field) == (b"a sound", "chat.messages[0].parts[0].audio")
    assert (second.url, second.field) == ("https://a/b.wav", "chat.messages[0].parts[1].audio_url")
    assert {first.kind, second.kind} == {types_pb2.MEDIA_KIND_AUDIO}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatMessage(role="user", content="a", parts=[pb.ContentPart(text="b")]), "chat.messages[0].parts"),
        (pb.ChatMessage(role="user", parts=[pb.ContentPart()]), "chat.messages[0].parts[0]"),
        (pb.ChatMessage(role="user", parts=[pb.ContentPart(audio_url="a")]), "chat.messages[0].parts[0].audio_url"),
        (
            pb.ChatMessage(role="user", parts=[pb.ContentPart(image_url="file:///a")]),
            "chat.messages[0].parts[0].image_url",
        ),
    ],
)
def test_wrong_parts_are_named(message: pb.ChatMessage, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        read_chat_prompt(pb.ChatPrompt(messages=[message]))
    assert refusal.value.field == field
