"""Writes the texts that vLLM's parsers and ours are given: ``python -m tests.services.gateway.formats.recorded.texts``.

They go into ``vllm.json``, in which ``record.py`` then writes what vLLM makes of them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenloom.request.reasoning import FORMATS as REASONING
from tokenloom.request.tool_format import FORMATS, HERMES, ToolFormat
from tokenloom.services.tokenizer.tool_probe import write_calls

RECORDED = Path(__file__).parent / "vllm.json"
SCHEMAS: Mapping[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "tags": {"type": "array"}, "done": {"type": "boolean"}},
    },
}
"""Parameters of the tools of every text."""
Call = tuple[str, dict[str, Any]]
_COMMAND = ToolFormat(
    "json",
    ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    separator=",\n    ",
    before_name='{"tool_call_id": "0", "tool_name": "',
    after_name='", "parameters": ',
    after_arguments="}",
)
"""Of Command R7B and A, which ours derives from the template."""
FAMILIES: Mapping[str, tuple[ToolFormat, str]] = {
    # Not gpt-oss: vLLM's parser fetches a vocabulary when it is loaded.
    **{name: (FORMATS[name], "") for name in FORMATS if name != "openai"},
    "cohere_command3": (_COMMAND, "cohere_command3"),
    "deepseek_v31": (FORMATS["deepseek_v31"], "deepseek_r1"),
    "gemma4": (FORMATS["gemma4"], "gemma4"),
    "glm45": (FORMATS["glm45"], "glm45"),
    "granite4": (HERMES, ""),
    "hermes": (HERMES, "qwen3"),
    "kimi_k2": (FORMATS["kimi_k2"], "kimi_k2"),
    "minimax_m2": (FORMATS["minimax_m2"], "minimax_m2"),
    "qwen3_coder": (FORMATS["qwen3_coder"], "qwen3"),
    "seed_oss": (FORMATS["seed_oss"], "seed_oss"),
    "step3p5": (FORMATS["qwen3_coder"], "step3p5"),
    "qwen3_xml": (FORMATS["qwen3_coder"], ""),
    "nemotron_v3": (FORMATS["qwen3_coder"], "nemotron_v3"),
    "longcat": (
        ToolFormat(
            "json",
            call=("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
            separator="\n",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
        ),
        "",
    ),
    "mistral": (
        ToolFormat("named", ("[TOOL_CALLS]", ""), separator="[TOOL_CALLS]", after_name="[ARGS]"),
        "mistral",
    ),
}
"""By vLLM's tool parser: how its models write calls, and vLLM's parser of their reasoning; empty: none."""
OURS = {name: name for name in ("deepseek_r1", "seed_oss", "mistral", "gemma4")} | {"cohere_command3": "cohere_command"}
"""By vLLM's parser of reasoning, the name of our format; of others it is qwen3, with the same marks."""
TOOL_PARSERS = {"nemotron_v3": "qwen3_coder"}
"""Families whose tool parser has another name."""
_CITY: Call = ("get_weather", {"city": "Oslo", "days": 3})
_NOW: Call = ("now", {})
THOUGHT = "The sky is asked for; I look it up."


def calls_of_kinds(form: ToolFormat) -> Mapping[str, list[Call]]:
    """The calls of each kind of text."""
    opts = {"a": [1, True, None], "b": {"c": "d", "e": []}}
    marks = " ".join(mark.strip() for mark in (form.call[1], form.section[1], form.pair[2], "</tool_call>") if mark)
    return {
        "single": [_CITY],
        "parallel": [_CITY, _NOW, ("note", {"text": "b", "tags": ["x"]})],
        "nested": [("get_weather", {"city": "Oslo", "opts": opts})],
        "unicode": [("get_weather", {"city": "Tromsø 北京 🌧", "days": 1})],
        "empty": [_NOW],
        "quotes": [("note", {"text": 'He said "no", \\ and {left}: [1]', "done": True})],
        "lines": [("note", {"text": "one\n\n  two\n", "tags": []})],
        "number_as_text": [("get_weather", {"city": "5"})],
        "marks": [("note", {"text": f"a {marks} b"})],
    }


def texts(family: str) -> Iterator[tuple[str, str]]:
    """Yield each kind of text, and the text."""
    form, reasoning = FAMILIES[family]
    kinds = {kind: write_calls(form, calls) for kind, calls in calls_of_kinds(form).items()}
    yield from kinds.items()
    single = kinds["single"]
    yield "text_before", f"I look it up.\n\n{single}"
    yield "text_after", f"{single}\nThat is all."
    yield "no_call", "It is 5 < 6, and [1] is a list: {none}."
    yield "broken_mark", "Write <tool_cal or [TOOL, and no more."
    yield "cut_in_value", single[: single.index("Oslo") + 2]
    yield "cut_in_name", single[: single.index("get_weather") + 5]
    yield "cut_after_first", kinds["parallel"][: kinds["parallel"].index("now") + 1]
    if reasoning:
        marks = REASONING[OURS.get(reasoning, "qwen3")]
        thought = f"{marks.start}\n{THOUGHT}"
        yield "reasoning", f"{thought}\n{marks.end}\n\n{single}"
        yield "reasoning_then_text", f"{thought}\n{marks.end}\n\nHello."
        yield "reasoning_cut", thought


def main() -> None:
    cases = [
        {"family": family, "kind": kind, "text": text} for family in sorted(FAMILIES) for kind, text in texts(family)
    ]
    parsers = {family: [TOOL_PARSERS.get(family, family), FAMILIES[family][1]] for family in sorted(FAMILIES)}
    RECORDED.write_text(json.dumps({"parsers": parsers, "tools": SCHEMAS, "cases": cases}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
