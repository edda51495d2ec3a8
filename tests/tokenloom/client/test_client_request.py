"""What becomes of a caller's arguments."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.client import ToolCall, errors
from tokenloom.client.client_request import chat_request, check_streamed, prompt_request
from tokenloom.client.options import Options
from tokenloom.client.pooled import classify_request, embed_request, pool_request, score_request
from tokenloom.request.sampling_params import StructuredOutputsParams
from tokenloom.v1 import types_pb2

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
    "extra_args": {"ban": [1]},
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
    "truncate_prompt_tokens": -1,
    "add_special_tokens": False,
    "return_prompt_token_ids": True,
    "return_timeline": True,
    "priority": -1,
    "session": "one",
    "keep_seconds": 300,
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
    others = {"use_beam_search", "length_penalty", "request_id", "ttft_deadline"}
    assert set(VALUES) | set(OF_THE_REQUEST) | others == set(Options.__struct_fields__)
    request = prompt_request("abc", {"model": "m", **VALUES, **OF_THE_REQUEST, "request_id": "r"})
    assert {field.name for field, _ in request.sampling_params.ListFields()} == set(VALUES)
    assert {name: getattr(request, name) for name in OF_THE_REQUEST} == OF_THE_REQUEST
    assert (request.user_request_id, request.model, request.text) == ("r", "m", "abc")


def test_a_deadline_for_the_first_token() -> None:
    assert prompt_request("abc", {"ttft_deadline": 1.5}).ttft_deadline.ToMilliseconds() == 1500
    assert not prompt_request("abc", {"ttft_deadline": None}).HasField("ttft_deadline")


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
        ({"ttft_deadline": 0}, "ttft_deadline"),
        ({"ttft_deadline": float("nan")}, "ttft_deadline"),
        ({"ttft_deadline": 3601}, "ttft_deadline"),
        ({"ttft_deadline": True}, "ttft_deadline"),
        ({"ttft_deadline": "1"}, "ttft_deadline"),
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
    for options in ({"max_pixels": -1}, {"max_pixels": "9"}, {1: 9}, 9):
        with pytest.raises(errors.InvalidArgument, match="mm_processor_kwargs"):
            chat_request([], {"mm_processor_kwargs": options})
    assert dict(chat_request([], {"mm_processor_kwargs": {"max_pixels": 9}}).chat.mm_processor_kwargs) == {
        "max_pixels": 9
    }


@pytest.mark.parametrize(("rate", "is_apart"), [(2, False), (0.5, True)])
def test_a_fraction_of_frames_a_second_has_a_field_of_its_own(rate: float, is_apart: bool) -> None:
    chat = chat_request([], {"mm_processor_kwargs": {"max_pixels": 9, "fps": rate}}).chat
    assert dict(chat.mm_processor_kwargs) == {"max_pixels": 9} | ({} if is_apart else {"fps": 2})
    assert (chat.HasField("fps"), chat.fps) == (is_apart, rate if is_apart else 0.0)


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


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: prompt_request("a\ud800", {}), "prompt"),
        (lambda: prompt_request(None, {}), "prompt"),  # type: ignore[arg-type]
        (lambda: prompt_request("a", {"request_id": 5}), "request_id"),
        (lambda: prompt_request("a", {"priority": "high"}), "priority"),
        (lambda: chat_request(5, {}), "messages"),  # type: ignore[arg-type]
        (lambda: chat_request(["hi"], {}), "messages[0]"),  # type: ignore[list-item]
        (lambda: chat_request([{"role": "user", "content": [1]}], {}), "messages[0].content[0]"),  # type: ignore[typeddict-item]
        (lambda: chat_request([{"role": "user", "image": "x"}], {}), "messages[0].image"),  # type: ignore[typeddict-unknown-key]
        (lambda: chat_request([{"role": "assistant", "tool_calls": [{}]}], {}), "messages[0].tool_calls"),  # type: ignore[typeddict-item]
        (lambda: chat_request([], {"tools": [{"function": {"name": 5}}]}), "tools[0].function"),
        (lambda: embed_request("one text"), "inputs"),
        (lambda: embed_request([["a"]]), "inputs[0]"),  # type: ignore[list-item]
        (lambda: embed_request(["a"], dimensions="many"), "dimensions"),
        (lambda: classify_request(["a"], use_activation="yes"), "use_activation"),
        (lambda: score_request("q", "one document"), "documents"),
        (lambda: score_request(5, ["d"]), "query"),  # type: ignore[arg-type]
        (lambda: pool_request(["a"], "nonsense"), "task"),
        (lambda: pool_request(["a"], "embed", truncate_prompt_tokens=1.5), "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_value_is_an_error_of_ours_that_names_the_argument(make: Callable[[], object], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refusal:
        make()
    assert refusal.value.field == field
    assert field in refusal.value.message


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    for make in (
        lambda: prompt_request("a", {"max_token": 5}),
        lambda: embed_request(["a"], use_activation=True),
        lambda: score_request("q", ["d"], inputs=[]),
    ):
        with pytest.raises(TypeError, match="is not an option"):
            make()


def test_pooling_options_reach_their_fields() -> None:
    request = embed_request(
        ["a", [1, 2]], model="m", dimensions=3, normalize=False, truncate_prompt_tokens=4, priority=5
    )
    assert (request.model, request.dimensions, request.normalize) == ("m", 3, False)
    assert (request.options.truncate_prompt_tokens, request.options.priority) == (4, 5)
    assert (request.inputs[0].text, list(request.inputs[1].token_ids.ids)) == ("a", [1, 2])
    assert not embed_request(["a"], dimensions=None).HasField("dimensions")
    assert pool_request(["a"], "token_embed").task == types_pb2.POOLING_TASK_TOKEN_EMBED


_WAV = "data:audio/wav;base64,AAAA"


def test_parts_of_messages() -> None:
    url = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    inline = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    heard = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    sounds = [heard, *({"type": "audio_url", "audio_url": {"url": at}} for at in ("https://a/b.wav", _WAV))]
    content = ["What is", b"an image", {"type": "text", "text": "this?"}, url, inline, *sounds]
    (message,) = chat_request([{"role": "user", "content": content}], {}).chat.messages
    assert [(part.WhichOneof("part"), getattr(part, part.WhichOneof("part") or "")) for part in message.parts] == [
        ("text", "What is"),
        ("image", b"an image"),
        ("text", "this?"),
        ("image_url", "https://a/b.png"),
        ("image", bytes(3)),
        ("audio", bytes(3)),
        ("audio_url", "https://a/b.wav"),
        ("audio", bytes(3)),
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "file_url"}, r"messages\[0\].content\[0\] must be a text"),
        ({"type": "input_audio"}, "input_audio.data is not base64"),
        ({"type": "input_audio", "input_audio": {"data": "!"}}, "input_audio.data is not base64"),
        ({"type": "audio_url", "audio_url": "data:audio/wav;base64,!"}, "audio_url is not base64"),
        (3, "must be a text"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}, "image_url is not base64"),
    ],
)
def test_wrong_parts_are_refused(part: object, message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        chat_request([{"role": "user", "content": [part]}], {})
