"""The grammar of a family accepts the calls that its template writes, and nothing that its parser reads otherwise."""

import json
from functools import cache
from typing import Any

import pytest

from tests.services.gateway.formats.test_families import rendered
from tests.services.gateway.formats.test_tool_formats import parsed
from tests.services.tokenizer.families import FAMILIES, form_of
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.tool_format import ID, ToolFormat
from tokenloom.services.gateway.assistant.message_plans import MessagePlans
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.pairs import ValueKind, value_kind
from tokenloom.services.gateway.formats.strict_calls import force, strict_constraint
from tokenloom.services.gateway.formats.tool_request import ToolRequest, read_tool_request
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import types_pb2
from tokenloom.v1.types_pb2 import SamplingParams

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1},
        "hourly": {"type": "boolean"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
_REQUIRED = WEATHER["required"]
GOOD: list[dict[str, Any]] = [
    {"city": "Oslo", "days": 3},
    {"city": "São Paulo, <b>", "unit": "F", "days": 1, "hourly": True, "at": {"lat": -1.5}},
]
BAD: list[dict[str, Any]] = [{"city": "Oslo"}, {"city": "Oslo", "days": 0}, {"city": "Oslo", "unit": "K", "days": 3}]
BOUND = [family for family in FAMILIES if form_of(family).demands_calls]
ONE = ("llama3_1",)


@cache
def backend() -> LLGuidanceBackend:
    size = load_tokenizer(DEMO_MODEL).get_vocab_size(with_added_tokens=True)
    return LLGuidanceBackend(DEMO_MODEL / "tokenizer.json", size, (0,))


def accepts(constraint: types_pb2.StructuredOutputs, text: str) -> bool:
    """Whether an engine can write the text, and end there."""
    grammar = backend()
    kind, source = GrammarKind.STRUCTURAL_TAG, constraint.structural_tag
    matcher = grammar.load(grammar.prepare(StructuredOutput(kind, source))).start()
    tokens = load_tokenizer(DEMO_MODEL).encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(tokens) == len(tokens)


def request(choice: Any) -> ToolRequest:
    return read_tool_request(TOOLS, choice, True)


def written(family: str, *calls: tuple[str, dict[str, Any]]) -> str:
    if form_of(family).syntax == "python":
        # The arguments that must be there come first, so that the grammar knows where commas are.
        calls = tuple(
            (name, dict(sorted(each.items(), key=lambda pair: pair[0] not in _REQUIRED))) for name, each in calls
        )
    return rendered(family, calls).strip().replace("=true", "=True")


def forced(form: ToolFormat, choice: Any) -> types_pb2.StructuredOutputs:
    return force(request(choice), form).constraint


@pytest.mark.parametrize("family", BOUND)
def test_a_required_call_is_written_as_the_template_does(family: str) -> None:
    form = form_of(family)
    constraint = forced(form, "required")
    for arguments in GOOD:
        text = written(family, ("get_weather", arguments))
        assert accepts(constraint, text), text
        found = parsed(open_parser(form, request("required").tools), list(text))
        assert (found[0], json.loads(found[1][0][1])) == ("", arguments)
    for arguments in BAD:
        assert not accepts(constraint, written(family, ("get_weather", arguments)))
    assert not accepts(constraint, "I am sorry")
    assert not accepts(constraint, written(family, ("other", {})))


@pytest.mark.parametrize("family", [family for family in BOUND if family not in ONE])
def test_several_calls_or_one(family: str) -> None:
    text = written(family, ("get_weather", GOOD[0]), ("stop", {}))
    form = form_of(family)
    assert accepts(forced(form, "required"), text)
    one = force(read_tool_request(TOOLS, "required", False), form).constraint
    assert not accepts(one, text)
    assert accepts(one, written(family, ("stop", {})))


@pytest.mark.parametrize("family", BOUND)
def test_a_named_call_is_of_that_tool(family: str) -> None:
    constraint = forced(form_of(family), {"type": "function", "function": {"name": "get_weather"}})
    assert accepts(constraint, written(family, ("get_weather", GOOD[1])))
    assert not accepts(constraint, written(family, ("stop", {})))


@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).binds_arguments])
def test_a_strict_tool_is_bound_where_the_model_calls_it(family: str) -> None:
    constraint = strict_constraint(request("auto"), form_of(family))
    assert constraint is not None
    good, bad = (written(family, ("get_weather", arguments)) for arguments in (GOOD[1], BAD[1]))
    before = "I look. " if form_of(family).is_marked else ""
    assert accepts(constraint, f"{before}{good}")
    assert not accepts(constraint, f"{before}{bad}")
    assert accepts(constraint, "It is warm.")


def function(name: str, properties: dict[str, Any] | None = None, *, strict: bool = False) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties or {}}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def read(form: ToolFormat, tools: list[dict[str, Any]], text: str) -> Any:
    found = parsed(open_parser(form, read_tool_request(tools, "auto", True).tools), list(text))
    return found[0], [(name, json.loads(arguments)) for name, arguments in found[1]]


@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).syntax in ("pairs", "python")])
def test_a_tool_without_properties_may_be_called_with_any_arguments_and_with_none(family: str) -> None:
    form, tools = form_of(family), [function("f")]
    constraint = force(read_tool_request(tools, "required", True), form).constraint
    for arguments in ({}, {"a": 1}, {"a": 1, "b_2": [2.5]}):
        text = rendered(family, [("f", arguments)]).strip()
        assert accepts(constraint, text), text
        assert read(form, tools, text) == ("", [("f", arguments)])
    empty = rendered(family, [("f", {})]).strip()
    name = empty.index(form.before_name + "f") + len(form.before_name + "f" + form.after_name)
    assert not accepts(constraint, f"{empty[:name]} words {empty[name:]}")


@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).binds_arguments])
def test_a_tool_beside_a_strict_one_may_have_any_arguments(family: str) -> None:
    tools = [function("f", {"a": {"type": "integer"}}, strict=True), function("g", {"b": {"type": "integer"}})]
    constraint = strict_constraint(read_tool_request(tools, "auto", True), form_of(family))
    assert constraint is not None
    assert accepts(constraint, rendered(family, [("g", {"b": 1})]).strip())


TEXT_OR_NULL: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"enum": ["90210", "nil", None]},
]


@pytest.mark.parametrize("schema", TEXT_OR_NULL)
@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).syntax == "pairs"])
def test_a_text_that_may_be_null_stays_a_text(family: str, schema: dict[str, Any]) -> None:
    form, tools = form_of(family), [function("f", {"zip": schema}, strict=True)]
    constraint = force(read_tool_request(tools, "required", True), form).constraint
    for value in ("90210", "nil", None):
        text = rendered(family, [("f", {"zip": value})]).strip().replace("None", "null")
        assert accepts(constraint, text), text
        assert read(form, tools, text) == ("", [("f", {"zip": value})])


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "const": "C"}, "C", "F"),
        ({"const": "5"}, "5", "6"),
        ({"type": "string", "enum": ["C", None, 5]}, "C", "5"),
        ({"type": "string", "enum": ["", "C"]}, "C", "F"),
        ({"type": "string", "enum": ["", "C"]}, "", "F"),
        ({"$ref": "#/properties/unit"}, "C", "F"),
    ],
)
def test_a_text_is_one_of_those_that_its_schema_names(schema: dict[str, Any], good: str, bad: str) -> None:
    form = form_of("qwen3_coder")
    tools = [function("f", {"x": schema, "unit": {"enum": ["C", "K"]}}, strict=True)]
    constraint = force(read_tool_request(tools, "required", True), form).constraint
    text = rendered("qwen3_coder", [("f", {"x": good})])
    assert accepts(constraint, text)
    assert read(form, tools, text) == ("", [("f", {"x": good})])
    assert not accepts(constraint, rendered("qwen3_coder", [("f", {"x": bad})]))


BOUNDS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^[A-Z]{2}[0-9]+$"}, ["AB1", "XY123"], ["ab1", "AB", "AB1\n", "xAB1"]),
    ({"type": "string", "pattern": "b+|^c$"}, ["abc", "b", "c", "<b>"], ["a", "cc", ""]),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "é🙂ü<"], ["a", "", "abcde"]),
    ({"type": "string", "maxLength": 3}, ["", "a b"], ["a b."]),
    ({"type": "string", "minLength": 3}, ["a\nb", "long enough, and more"], ["ab"]),
    ({"type": "string", "pattern": "^a", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "bab", "abcd"]),
    ({"anyOf": [{"type": "string", "pattern": "^x+$"}, {"type": "null"}]}, ["xx", None], ["y"]),
    ({"$ref": "#/$defs/code"}, ["K7"], ["7K"]),
    ({"type": "integer", "minimum": 3, "maximum": 40}, [3, 40], [2, 41, 100]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, [0.5], [0.0, 1.0, -0.5]),
    ({"type": "integer", "multipleOf": 5}, [10], [11]),
    ({"$ref": "#/$defs/share"}, [0.25], [1.5]),
    ({"type": ["integer", "null"], "minimum": 3}, [3, None], [2]),
]
DEFS: dict[str, Any] = {
    "code": {"type": "string", "pattern": "^[A-Z][0-9]$"},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
}


@pytest.mark.parametrize(("schema", "good", "bad"), BOUNDS)
@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).syntax == "pairs"])
def test_texts_and_numbers_keep_the_bounds_of_their_schema(
    family: str, schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    form = form_of(family)
    parameters = {"type": "object", "properties": {"x": schema, "y": {"type": "integer"}}, "$defs": DEFS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    constraint = force(read_tool_request(tools, "required", True), form).constraint

    def text_of(value: Any) -> str:
        return rendered(family, [("f", {"x": value, "y": 1})]).strip().replace("None", "null")

    for value in good:
        assert accepts(constraint, text_of(value)), text_of(value)
        assert read(form, tools, text_of(value)) == ("", [("f", {"x": value, "y": 1})])
    for value in bad:
        assert not accepts(constraint, text_of(value)), text_of(value)


@pytest.mark.parametrize("family", [family for family in BOUND if form_of(family).syntax == "pairs"])
def test_a_bound_text_ends_where_the_parser_ends_it(family: str) -> None:
    form = form_of(family)
    tools = [function("f", {"x": {"type": "string", "maxLength": 200}, "y": {"type": "integer"}}, strict=True)]
    constraint = force(read_tool_request(tools, "required", True), form).constraint
    text = rendered(family, [("f", {"x": "a", "y": 1})]).strip()
    assert accepts(constraint, text)
    at = text.index("a" + form.pair[2].rstrip()) + 1
    assert not accepts(constraint, f"{text[:at]}{form.pair[2]}b{text[at:]}")


@pytest.mark.parametrize("schema", [{}, *TEXT_OR_NULL, {"type": "string"}, {"type": "integer"}])
@pytest.mark.parametrize("value", ["", " ", "\n", "\n\n x", "nil", "null", "5\n"])
def test_blanks_of_a_value_do_not_depend_on_the_pieces(schema: dict[str, Any], value: str) -> None:
    form, tools = form_of("qwen3_coder"), read_tool_request([function("f", {"x": schema})], "auto", True).tools
    text = rendered("qwen3_coder", [("f", {"x": value})])
    whole = parsed(open_parser(form, tools), [text])
    assert parsed(open_parser(form, tools), list(text)) == whole
    if value.strip() not in ("null", "5"):
        assert json.loads(whole[1][0][1]) == {"x": value}


def test_a_choice_that_names_itself_is_followed_a_few_times() -> None:
    steps = 0

    class Counted(dict[str, Any]):
        def get(self, name: Any, default: Any = None) -> Any:
            nonlocal steps
            steps += 1
            return super().get(name, default)

    ways: list[Any] = []
    choice = Counted(anyOf=ways)
    ways += [{"$ref": "#/properties/x"}] * 16
    schema = {"properties": {"x": choice}}
    assert value_kind(schema, "x") is ValueKind.UNKNOWN
    assert steps < 5000


def test_ids_have_their_place() -> None:
    form = form_of("mistral_v11")
    assert ID in form.after_name
    text = written("mistral_v11", ("stop", {}))
    assert accepts(forced(form, "required"), text)
    assert not accepts(forced(form, "required"), text.replace("zqid00001", "x"))


def test_tools_beyond_the_limit_of_formats_are_written_as_json() -> None:
    properties = {f"p{at}": {"type": "string"} for at in range(20)}
    schema = {"type": "object", "properties": properties}
    many = [{"type": "function", "function": {"name": f"f{at}", "parameters": schema}} for at in range(20)]
    found = force(read_tool_request(many, "required", True), form_of("qwen3_coder"))
    assert found.constraint.json
    assert found.form is not None
    assert not found.form.is_marked


def test_strict_tools_beyond_the_limit_of_formats_are_named() -> None:
    properties = {f"p{at}": {"type": "string"} for at in range(20)}
    schema = {"type": "object", "properties": properties}
    many = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": schema, "strict": True}} for at in range(20)
    ]
    generate = GenerateRequest(prompts=["hi"], prompt_field="messages", sampling=SamplingParams(), tenant=NO_TENANT)
    plans = MessagePlans(form_of("qwen3_coder"))
    _, unbound = plans.apply(read_tool_request(many, "auto", True), generate, include_reasoning=True)
    assert unbound == ("tools[].function.strict",)
    assert not generate.sampling.HasField("structured_outputs")
