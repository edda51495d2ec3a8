"""Requests that no gateway may let through, and the field each must be refused for."""

import math
from dataclasses import dataclass
from typing import Any

from tokenloom.v1 import inference_pb2, types_pb2

HUGE = 2**63
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class BadBody:
    """A body with one thing wrong."""

    path: str
    fields: dict[str, Any]
    param: str | None
    status: int = 400

    def __str__(self) -> str:
        return f"{self.path.rpartition('/v1/')[2]} {str(self.fields)[:60]}"


def both(param: str, *values: Any) -> list[BadBody]:
    """Each value as one field of either endpoint."""
    return [BadBody(path, {param: value}, param) for value in values for path in (CHAT, COMPLETIONS)]


def completion(param: str, **fields: Any) -> BadBody:
    return BadBody(COMPLETIONS, fields, param)


def chat(param: str, messages: Any) -> BadBody:
    return BadBody(CHAT, {"messages": messages}, param)


def bad_bodies(vocab_size: int, max_model_len: int) -> list[BadBody]:
    """All of them, for a model of this size."""
    user = {"role": "user", "content": "hi"}
    return [
        *(BadBody(path, {"model": "other"}, "model", 404) for path in (CHAT, COMPLETIONS)),
        *both("model", 5, [], {}),
        *both("max_tokens", 0, -1, 1.5, "3", True, HUGE, max_model_len, [1]),
        *both("temperature", -1, -0.1, "hot", True, [0], {}),
        *both("top_p", 0, -1, 1.01, "x", False),
        *both("top_k", -2, 1.5, "x", True, HUGE),
        *both("min_p", -0.1, 1.1, "x"),
        *both("seed", 1.5, "x", True, 2**64, -(2**63) - 1),
        *both("presence_penalty", -2.1, 2.1, "x", []),
        *both("frequency_penalty", -2.1, 2.1, {}),
        *both("repetition_penalty", 0, -1, "x"),
        *both("stop", "", ["a", ""], [1], 5, {}, ["a"] * 17, ["x" * 5000]),
        *both("stop_token_ids", [-1], [vocab_size], [1.5], [True], ["a"], "a", 5, [2**32]),
        *both("n", 0, -1, 1.5, "2", True, 129, HUGE),
        *both("stream", 1, "yes"),
        *both("stream_options", 5, {"include_usage": True}),
        *both("logit_bias", {"5": 101}, {"5": "1"}, {"a": 1}, {"-1": 1}, {str(vocab_size): 1}, {str(HUGE): 1}, [], 5),
        *both("min_tokens", -1, 1.5, "3", True, HUGE, max_model_len + 1),
        *both("prompt_logprobs", True, -1, -2, 21, 1.5, "1", HUGE, []),
        *both("logprob_token_ids", [0], [vocab_size], [-1], "a"),
        *both(
            "allowed_token_ids", [], [vocab_size], [-1], [1.5], [True], ["1"], "a", 5, [2**32], [0] * (vocab_size + 1)
        ),
        *both("repetition_detection", 5, [], {"size": 1}, {"max_pattern_size": 3}),
        *both("repetition_detection", {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}),
        *both("repetition_detection", {"max_pattern_size": HUGE, "min_count": 2}),
        *both("repetition_detection", {"max_pattern_size": 0, "min_count": 1025}),  # off, and still not valid
        *both("skip_reading_prefix_cache", 1, "true"),
        *both("thinking_token_budget", 5, {}, -1, 1.5),
        *both("extra_args", {"a": 1}),
        *both("ignore_eos", "x"),
        completion("tools", tools=[{"type": "function"}]),
        completion("tool_choice", tool_choice="required"),
        *(BadBody(CHAT, fields, param) for param, fields in bad_tools()),
        *both("response_format", "json", {"type": "xml"}, {"type": "json_schema", "json_schema": {}}),
        *both("structured_outputs", "json", {}, {"json": {}, "regex": "a"}, {"structural_tag": "{}"}),
        *both("structured_outputs", *poisonous_constraints()),
        *both("guided_json", {"type": "object"}),
        *both("kv_transfer_params", {}),
        completion("prompt"),
        completion("prompt", prompt=None),
        completion("prompt", prompt=""),
        completion("prompt", prompt=[]),
        completion("prompt", prompt=[[]]),
        completion("prompt", prompt=["a", ""]),
        completion("prompt", prompt=["a", 5]),
        completion("prompt", prompt=[["a"]]),
        completion("prompt", prompt={"text": "a"}),
        completion("prompt", prompt=7),
        completion("prompt", prompt=[1, -1]),
        completion("prompt", prompt=[1, vocab_size]),
        completion("prompt", prompt=[1, 1.5]),
        completion("prompt", prompt=[1, True]),
        completion("prompt", prompt=[1, None]),
        completion("prompt", prompt=[1, HUGE]),
        completion("prompt", prompt=[1] * max_model_len),
        completion("prompt", prompt=[1] * (max_model_len * 100)),
        completion("prompt", prompt="word " * (max_model_len * 2)),
        completion("prompt", prompt="x" * 4_000_000),
        completion("prompt", prompt=["a"] * 2000),
        completion("max_tokens", prompt=[1] * (max_model_len - 4), max_tokens=5),
        *(completion("logprobs", logprobs=value) for value in (-1, -2, 21, True, "1", 1.5, HUGE, [])),
        *(completion("echo", echo=value) for value in ("yes", 1)),
        *(completion("best_of", best_of=value) for value in (2, 0, "1")),
        completion("best_of", n=2, best_of=3),
        completion("n", prompt=["a"] * 9, n=128),
        BadBody(CHAT, {"n": 2, "temperature": 0}, "n"),
        completion("n", n=2, temperature=1e-9),
        completion("max_tokens", max_tokens=0),
        completion("prompt_logprobs", prompt_logprobs=1, stream=True),
        *both("bad_words", "no", [""], [" "], ["a" * 1025], ["a"] * 513, [1], 5, {}),
        *both("truncate_prompt_tokens", 0, -2, max_model_len + 1, "1", True, 1.5),
        *both("detokenize", 0, "no"),
        *both("stream_interval", 0, -1, "1", True),
        *both("add_special_tokens", 1),
        *both("return_tokens_as_token_ids", 1),
        *both("priority", 1.5, "1", True, HUGE),
        completion("stop", stop="a", detokenize=False),
        chat("messages", []),
        chat("messages", "hi"),
        chat("messages", {}),
        chat("messages", ["hi"]),
        chat("messages[0].role", [{"content": "hi"}]),
        chat("messages[0].role", [{"role": "king", "content": "hi"}]),
        chat("messages[1].content", [user, {"role": "user"}]),
        chat("messages[0].content", [{"role": "user", "content": None}]),
        chat("messages[0].content", [{"role": "user", "content": []}]),
        chat("messages[0].content[0].type", [{"role": "user", "content": [{"type": "file"}]}]),
        chat("messages[0].content[0].input_audio", [{"role": "user", "content": [{"type": "input_audio"}]}]),
        chat("messages[0].content[0].video_url", [{"role": "user", "content": [{"type": "video_url"}]}]),
        chat("messages[0].content[0].image_url", [{"role": "user", "content": [{"type": "image_url"}]}]),
        chat("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
        *(
            chat(f"messages[0].{param}", [{"role": "assistant", "content": "a", **fields}])
            for param, fields in bad_turns()
        ),
        chat("messages", [{"role": "user", "content": "word " * (max_model_len * 2)}]),
        BadBody(CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        *(BadBody(CHAT, {"logprobs": value}, "logprobs") for value in (1, "true", [])),
        *(BadBody(CHAT, {"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-2, "1", True, 1.5)),
        BadBody(CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        *(BadBody(CHAT, {"top_logprobs": value}, "top_logprobs") for value in (1, False, "0")),
        BadBody(CHAT, {"echo": True}, "echo"),
        BadBody(CHAT, {"add_special_tokens": True}, "add_special_tokens"),
        BadBody(CHAT, {"chat_template": "{{ 1 }}"}, "chat_template"),
    ]


def bad_tools() -> list[tuple[str, dict[str, Any]]]:
    """Param and fields."""
    tool = {"type": "function", "function": {"name": "f"}}
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    function = tool["function"]
    return [
        ("tools", {"tools": {}}),
        ("tools", {"tools": [tool] * 2}),
        ("tools", {"tools": [tool] * 129}),
        ("tools[0]", {"tools": ["f"]}),
        ("tools[0]", {"tools": [{"type": "function"}]}),
        ("tools[1].type", {"tools": [tool, {"type": "web_search", "function": function}]}),
        *(
            ("tools[0].function.name", {"tools": [{"function": {"name": name}}]})
            for name in (None, "", "a b", "a" * 65, 5)
        ),
        ("tools[0].function.parameters", {"tools": [{"function": {"name": "f", "parameters": []}}]}),
        ("tools[0].function.description", {"tools": [{"function": {"name": "f", "description": 5}}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [tool], "tool_choice": "always"}),
        ("tool_choice", {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("tool_choice", {"tools": [tool], "tool_choice": {"type": "allowed_tools"}}),
        (
            "tools[0].function.parameters",
            {"tools": [{"function": {"name": "f", "parameters": deep}}], "tool_choice": "required"},
        ),
        ("parallel_tool_calls", {"parallel_tool_calls": 1}),
        ("include_reasoning", {"include_reasoning": "no"}),
        ("chat_template_kwargs", {"chat_template_kwargs": []}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("function_call", {"function_call": {"name": "f"}}),
    ]


def bad_turns() -> list[tuple[str, dict[str, Any]]]:
    """Param and fields of an assistant's turn."""

    def call(**function: Any) -> dict[str, Any]:
        return {
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}]
        }

    return [
        ("tool_calls", {"tool_calls": {}}),
        ("tool_calls[0]", {"tool_calls": ["f"]}),
        ("tool_calls[0]", {"tool_calls": [{"type": "custom", "function": {}}]}),
        ("tool_calls[0].function.name", call(name=5)),
        ("reasoning_content", {"reasoning_content": 5}),
        *(("name", {"name": value}) for value in (5, 0, False)),
        ("function_call", {"function_call": {"name": "f"}}),
    ]


def poisonous_constraints() -> list[dict[str, Any]]:
    """What is refused before anything is compiled."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    return [
        {"json": schema},
        {"json": "[" * 3000 + "]" * 3000},
        {"json": {"enum": [f"value {n}" for n in range(20_000)]}},
        {"json": {"title": "x" * 100_000}},
        {"json": "{"},
        {"regex": "(a|b)" * 10_000},
        {"choice": ["a"] * 20_000},
        {"choice": []},
    ]


RAW_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no object": b"[]",
    "text": b"hello",
    "cut off": b'{"model": "x", "prompt": "a',
    "two values": b"{} {}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "1e400": b'{"prompt": "a", "temperature": 1e400}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}
"""Bodies that are no JSON object; none may reach a handler."""


def bad_calls(model: str, vocab_size: int, max_model_len: int) -> dict[str, tuple[inference_pb2.GenerateRequest, str]]:
    """Name to (request, field) for the public gRPC API."""
    params = types_pb2.SamplingParams

    def request(field: str, **fields: Any) -> tuple[inference_pb2.GenerateRequest, str]:
        return inference_pb2.GenerateRequest(**({"model": model, "text": "a"} | fields)), field

    def sampling(field: str, **fields: Any) -> tuple[inference_pb2.GenerateRequest, str]:
        return request(field, sampling_params=params(**fields))

    def ids(*values: int) -> tuple[inference_pb2.GenerateRequest, str]:
        prompt = types_pb2.TokenIds(ids=values)
        return inference_pb2.GenerateRequest(model=model, token_ids=prompt), "token_ids"

    floats = {
        "temperature": (-1, math.nan, math.inf),
        "top_p": (0, -1, 1.1, math.nan),
        "min_p": (-0.5, 1.5, math.nan),
        "presence_penalty": (-3, 3, math.nan),
        "frequency_penalty": (-3, 3, -math.inf),
        "repetition_penalty": (0, -1, math.nan, math.inf),
    }
    calls = {f"{name}={v}": sampling(name, **{name: v}) for name, values in floats.items() for v in values}
    chat = inference_pb2.ChatPrompt
    message = inference_pb2.ChatMessage
    return calls | {
        "max_tokens=0": sampling("max_tokens", max_tokens=0),
        "max_tokens huge": sampling("max_tokens", max_tokens=2**32 - 1),
        "min_tokens": sampling("min_tokens", min_tokens=5, max_tokens=4),
        "logprobs": sampling("logprobs", logprobs=21),
        "prompt_logprobs": sampling("prompt_logprobs", prompt_logprobs=2**32 - 1),
        "logprob_token_ids": sampling("logprob_token_ids", logprob_token_ids=[1]),
        "logit_bias": sampling("logit_bias", logit_bias={1: math.nan}),
        "logit_bias id": sampling("logit_bias", logit_bias={vocab_size: 1}),
        "allowed_token_ids": sampling("allowed_token_ids", allowed_token_ids=[vocab_size]),
        "bad_words": sampling("bad_words", bad_words=[types_pb2.TokenIds()]),
        "bad_words id": sampling("bad_words", bad_words=[types_pb2.TokenIds(ids=[vocab_size])]),
        "repetition_detection": sampling(
            "repetition_detection", repetition_detection=types_pb2.RepetitionDetection(min_count=2)
        ),
        "stop token": sampling("stop_token_ids", stop_token_ids=[vocab_size]),
        "n": request("n", n=129),
        "greedy samples": request("n", n=2, sampling_params=params(temperature=0.0)),
        "empty bad word": request("bad_words", bad_words=[""]),
        "no token": request("truncate_prompt_tokens", truncate_prompt_tokens=0),
        "stop without text": request("stop", stop=["a"], detokenize=False),
        "no prompt": (inference_pb2.GenerateRequest(model=model), "prompt"),
        "empty text": request("text", text=""),
        "long text": request("text", text="word " * (max_model_len * 2)),
        "no ids": ids(),
        "foreign id": ids(1, vocab_size),
        "many ids": ids(*[1] * max_model_len),
        "empty stop": request("stop", stop=[""]),
        "many stops": request("stop", stop=["a"] * 17),
        "priority": request("priority", priority=1),
        "empty chat": (inference_pb2.GenerateRequest(model=model, chat=chat()), "chat.messages"),
        "role": (
            inference_pb2.GenerateRequest(model=model, chat=chat(messages=[message(role="king", content="a")])),
            "chat.messages[0].role",
        ),
    }
