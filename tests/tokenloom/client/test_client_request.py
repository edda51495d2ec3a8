"""What becomes of a caller's arguments."""

import json
import re
from typing import Any

import pytest

from tokenloom.client import ToolCall, errors
from tokenloom.client.client_request import chat_request, check_streamed, prompt_request
from tokenloom.client.options import Options
from tokenloom.request.sampling_params import StructuredOutputsParams

VALUES: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "seed": 4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "stop_token_ids": [1],
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logprob_token_ids": [7],
    "logit_bias": {1: 2.0},
    "allowed_token_ids": [1, 2],
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 0,
    "return_routed_experts": True,
    "routed_experts_prompt_start": 3,
    "structured_outputs": StructuredOutputsParams(regex="a+"),
}
OF_THE_REQUEST: dict[str, Any] = {
    "stop": ["a", "b"],
    "n": 3,
    "bad_words": ["x"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "detokenize": False,
    "ignore_eos": True,
    "stream_interval": 4,
    "truncate_prompt_tokens": 9,
    "add_special_tokens": False,
    "return_prompt_token_ids": True,
    "return_timeline": True,
    "priority": -1,
}


def test_beam_search() -> None:
    assert not prompt_request("abc", {"use_beam_search": False}).HasField("beam_search")
    plain = prompt_request("abc", {"use_beam_search": True, "n": 3})
    assert plain.HasField("beam_search")
    assert not plain.beam_search.HasField("length_penalty")
    assert prompt_request("abc", {"use_beam_search": True, "length_penalty": 0}).beam_search.HasField("length_penalty")
    with pytest.raises(errors.InvalidArgument, match="length_penalty needs use_beam_search"):
        prompt_request("abc", {"length_penalty": 2.0})
    with pytest.raises(errors.InvalidArgument, match="length_penalty"):
        prompt_request("abc", {"use_beam_search": True, "length_penalty": "long"})
    with pytest.raises(errors.InvalidArgument, match="use_beam_search is not available in a stream"):
        check_streamed(plain)


def test_every_option_reaches_its_field() -> None:
    beams = {"use_beam_search", "length_penalty"}
    assert set(VALUES) | set(OF_THE_REQUEST) | beams | {"request_id"} == set(Options.__struct_fields__)
    request = prompt_request("abc", {"model": "m", **VALUES, **OF_THE_REQUEST, "request_id": "r"})
    assert {field.name for field, _ in request.sampling_params.ListFields()} == set(VALUES)
    assert {name: getattr(request, name) for name in OF_THE_REQUEST} == OF_THE_REQUEST
    assert (request.user_request_id, request.model, request.text) == ("r", "m", "abc")


def test_nothing_is_sent_that_was_not_given() -> None:
    request = prompt_request([1, 2], {"temperature": None})
    assert [field.name for field, _ in request.ListFields()] == ["token_ids", "sampling_params"]
    assert not request.sampling_params.ListFields()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"bad_words": "x"}, "bad_words"),
        ({"n": -1}, "n"),
        ({"n": "1"}, "n"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"^{word}") as caught:
        prompt_request("abc", options)
    assert caught.value.field == word


def test_unknown_names_and_values() -> None:
    with pytest.raises(TypeError, match="'temprature' is not an option"):
        prompt_request("abc", {"temprature": 1})
    with pytest.raises(errors.InvalidArgument, match="template_kwargs"):
        chat_request([], {"template_kwargs": {"x": object()}})


def test_tools_and_past_calls_reach_their_fields() -> None:
    parameters = {"type": "object", "properties": {"z": {}, "a": {}}}
    function = {"name": "get_weather", "description": "It.", "parameters": parameters}
    request = chat_request(
        [
            {"role": "assistant", "content": None, "tool_calls": [ToolCall("c1", "f", "{}")], "reasoning": "Hm."},
            {"role": "tool", "content": "noon", "tool_call_id": "c1"},
        ],
        {
            "model": "m",
            "tools": [{"type": "function", "function": function}, {"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "include_reasoning": False,
            "add_generation_prompt": False,
            "max_tokens": 3,
        },
    )
    assistant, tool = request.chat.messages
    assert (assistant.tool_calls[0].id, assistant.tool_calls[0].function.name, assistant.reasoning) == (
        "c1",
        "f",
        "Hm.",
    )
    assert tool.tool_call_id == "c1"
    first, second = (tool.function for tool in request.chat.tools)
    assert (first.name, first.description, list(json.loads(first.parameters)["properties"])) == (
        "get_weather",
        "It.",
        ["z", "a"],
    )
    assert [field.name for field, _ in second.ListFields()] == ["name"]
    assert request.chat.tool_choice.function == "f"
    for name in ("parallel_tool_calls", "include_reasoning", "add_generation_prompt"):
        assert request.chat.HasField(name)
        assert not getattr(request.chat, name)
    assert request.sampling_params.max_tokens == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": 5}}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f", "parameters": {"a": object()}}}]}, "tools[0].function"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"function": "f"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=f"^{re.escape(word)}") as caught:
        chat_request([{"role": "user", "content": "hi"}], options)
    assert caught.value.field == word
