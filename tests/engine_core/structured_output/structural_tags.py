"""Structural tags with texts that follow them and texts that do not, for every backend."""

import json
from typing import Any, NamedTuple

from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.request.output_constraints import current_form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ARGUMENTS = {"type": "json_schema", "json_schema": SCHEMA}
F = {"type": "tag", "begin": "<f=x>", "content": ARGUMENTS, "end": "</f>"}
G = {"begin": "<f=y>", "content": {"type": "regex", "pattern": "[0-9]+/[ab]"}, "end": "</f>"}
THINK = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
TURN = {"type": "tag", "begin": "<|im_start|>", "content": {"type": "any_text"}, "end": "<|im_end|>"}
X_CALL = '<tool_call>\n{"name": "x", "arguments": {"a": 1}}\n</tool_call>'
CALL, OTHER = '<f=x>{"a":1}</f>', "<f=y>23/b</f>"


class Case(NamedTuple):
    """A tag, texts that are complete, texts that are not, and texts that cannot be written."""

    tag: dict[str, Any]
    complete: tuple[str, ...]
    begun: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def constraint(self) -> StructuredOutput:
        return StructuredOutput(GrammarKind.STRUCTURAL_TAG, current_form(json.dumps(self.tag)))


def _of(kind: str, **members: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": kind, **members}}


def _triggered(**members: Any) -> dict[str, Any]:
    return _of("triggered_tags", triggers=["<f="], tags=[F, G], **members)


def _call(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the tag of a call, as the gateway describes those of strict tools."""
    content = {"type": "json_schema", "json_schema": schema}
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


CASES = {
    "calls": Case(
        _of("triggered_tags", triggers=["<tool_call>"], tags=[_call("x", SCHEMA), _call("xy", {"type": "object"})]),
        ("", "Well.", f"So: {X_CALL}\n{X_CALL}", X_CALL.replace('"x"', '"xy"').replace('"a"', '"b"')),
        ("<tool_call>", X_CALL[:40]),
        (X_CALL.replace('"x"', '"z"'), X_CALL.replace('"a"', '"b"'), X_CALL.replace("1", "true")),
    ),
    "legacy": Case(
        {"triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}]},
        ("", "hi < there", CALL, f"hi {CALL} there {CALL}"),
        ("<f=x>", '<f=x>{"a":1}'),
        ("hi <f=y>", '<f=x>{"b":1}', '<f=x>{"a":1,"b":2}', '<f=x>{"a":1}</g>'),
    ),
    "triggered": Case(
        _triggered(), ("", "hi", f"hi {CALL}{OTHER} so"), ("<f=y>23/",), ("<f=z>", "<f=y>a", f"{CALL}<f=z")
    ),
    "at least one": Case(_triggered(at_least_one=True), (CALL, f"{OTHER} hi {CALL}"), ("", "<f="), ("hi", "<f=z")),
    "stop after first": Case(_triggered(stop_after_first=True), ("", "hi", f"hi {CALL}"), (), (f"{CALL} hi",)),
    "one": Case(_triggered(at_least_one=True, stop_after_first=True), (CALL, OTHER), ("",), (f"{CALL}{CALL}", "hi")),
    "reasoning first": Case(
        _of("sequence", elements=[THINK, ARGUMENTS]),
        ('<think>hm < {"a": "b"}</think>{"a": 2}', '<think></think>{"a":1}'),
        ("<think>hm",),
        ('{"a":1}', "<think>hm</think>so"),
    ),
    "either": Case(
        _of("or", elements=[{"type": "const_string", "value": 'x"\\y'}, ARGUMENTS]),
        ('x"\\y', '{"a":1}'),
        ("x",),
        ("y",),
    ),
    "separated": Case(
        _of("tags_with_separator", tags=[F, G], separator=", "),
        ("", CALL, f"{CALL}, {OTHER}, {CALL}"),
        (f"{CALL}, ",),
        (f"{CALL}{OTHER}", "hi"),
    ),
    "some separated": Case(_of("tags_with_separator", tags=[F], separator=",", at_least_one=True), (CALL,), ("",)),
    "one separated": Case(
        _of("tags_with_separator", tags=[F], separator=",", stop_after_first=True), ("", CALL), (), (f"{CALL},",)
    ),
    "several ends": Case(
        _of("tag", begin="a", content={"type": "any_text"}, end=["b", "cc"]), ("axb", "axcc"), ("a", "axc"), ("x",)
    ),
    "special tokens": Case(
        _of("triggered_tags", triggers=["<|im_start|>"], tags=[TURN]),
        ("hi", "hi<|im_start|>you<|im_end|>there"),
        ("hi<|im_start|>you",),
        ("<|im_end|>",),
    ),
    "repeated": Case(_of("plus", content=F), (CALL, CALL + CALL), ("",), ("hi",)),
    "optional": Case(_of("optional", content=G), ("", OTHER), ("<f=y>",), (OTHER + OTHER,)),
    "star": Case(_of("star", content=G), ("", OTHER + OTHER), ("<f=y>",), ("hi",)),
}
