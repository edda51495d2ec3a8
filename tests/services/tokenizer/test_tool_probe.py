"""Tests what is derived from chat templates: of each family, of templates that refuse turns, and where nothing is."""

import pytest

from tests.services.tokenizer.families import BY_NAME, FAMILIES, form_of, template_of
from tokenloom.request.tool_format import ALNUM, FORMATS, ID, INDEX, NAME, from_json, to_json
from tokenloom.services.tokenizer.chat_template import ChatTemplate
from tokenloom.services.tokenizer.tool_probe import CallProbe, NotDerived, derive, derive_reasoning, write_calls

CALLS = [("get_weather", {"city": "Oslo"}), ("add", {}), ("f", {"a": "x y", "b": "z"})]
SAME_AS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "hermes3": "hermes",
    "smollm3": "hermes",
    "ernie4_5": "hermes",
    "granite4": "hermes",
    "granite3": "granite",
    "qwen3_coder": "qwen3_coder",
    "qwen3_5": "qwen3_coder",
    "seed_oss": "seed_oss",
    "glm4_5": "glm45",
    "glm4_7": "glm47",
    "minimax_m2": "minimax_m2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_r1": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "kimi_k2": "kimi_k2",
    "llama3_1": "llama3_json",
    "llama3_2": "pythonic",
    "functiongemma": "functiongemma",
    "gemma4": "gemma4",
    "hunyuan_a13b": "hunyuan_a13b",
    "jamba": "jamba",
    "xlam": "xlam",
    "phi4_mini": "phi4_mini_json",
    "internlm": "internlm",
    "olmo3": "olmo3",
    "gpt_oss": "openai",
}
"""The entries of the table, by the families that write the same calls."""


def without_blanks(text: str) -> str:
    return "".join(text.split())


def test_there_are_at_least_twenty_families() -> None:
    assert len(FAMILIES) >= 35
    assert set(SAME_AS) <= set(FAMILIES)


@pytest.mark.parametrize("family", SAME_AS)
def test_what_is_derived_writes_calls_as_the_table_does(family: str) -> None:
    derived, entry = form_of(family), FORMATS[SAME_AS[family]]
    assert derived.syntax == entry.syntax
    assert without_blanks(write_calls(derived, CALLS)) == without_blanks(write_calls(entry, CALLS))
    assert derived.openings == entry.openings


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*BY_NAME, "gpt_oss", "llama3_1")])
def test_what_is_derived_writes_calls_as_the_template_does(family: str) -> None:
    form = form_of(family)
    calls = [("f", {"a": "x", "b": "y"}), ("g", {}), ("h", {"long_name": "some words"})]
    written = write_calls(form, calls)
    if ID in form.after_name or ID in form.after_arguments:
        assert written.count("zqid00001") == len(calls)
    rendered = CallProbe(template_of(family)).region(calls)
    assert without_blanks(rendered).replace("'", '"') == without_blanks(written).replace("'", '"')
    assert from_json(to_json(form)) == form


def test_ids_are_in_the_form_that_the_template_accepts() -> None:
    assert form_of("mistral_v3").call_id == form_of("mistral_v11").call_id == ALNUM
    assert form_of("kimi_k2").call_id == f"functions.{NAME}:{INDEX}"
    own_ids = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<|call_begin|>functions."
        "{{ c.function.name }}:{{ loop.index0 }}<|args|>{{ c.function.arguments | tojson }}<|call_end|>{% endfor %}"
        "{% endfor %}"
    )
    assert derive(ChatTemplate(own_ids)).call_id == f"functions.{NAME}:{INDEX}"


def test_marks_around_answers_are_found() -> None:
    assert form_of("command_r7b").drops == ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


@pytest.mark.parametrize(
    ("family", "marks"),
    [
        ("qwen3", ("<think>", "</think>")),
        ("seed_oss", ("<seed:think>", "</seed:think>")),
        ("mistral_v13", ("[THINK]", "[/THINK]")),
        ("command_r7b", ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("qwen2_5", None),
    ],
)
def test_reasoning_is_derived(family: str, marks: tuple[str, str] | None) -> None:
    assert derive_reasoning(template_of(family)) == marks


def test_an_empty_reasoning_before_a_call_is_none_of_its_marks() -> None:
    source = template_of("qwen3").source.replace(
        "{%- for call in", '{{- "<think>\\n\\n</think>\\n\\n" if message.tool_calls }}\n{%- for call in'
    )
    assert derive(ChatTemplate(source)).openings == ("<tool_call>",)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "the name of a call is not written"),
        (
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
            "{% endfor %}",
            "the arguments of a call are not written",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}"
            "{% endfor %}",
            "the template refuses a turn: no calls",
        ),
        (
            template_of("minimax_m2").source.replace(
                "(value if value is string else value | tojson)", "(value | tojson)"
            ),
            "numbers are not written as texts",
        ),
    ],
)
def test_what_cannot_be_derived_is_said(source: str, reason: str) -> None:
    with pytest.raises(NotDerived, match=reason):
        derive(ChatTemplate(source))


def template_with(call: str, thought: str = "") -> ChatTemplate:
    return ChatTemplate(
        "{% for m in messages %}" + thought + "<|im_start|>{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("<call>{{ loop.index0 }}:{{ c.function.name }} {{ c.function.arguments | tojson }}</call>", "before its name"),
        ("{{ c.function.name }}\n{{ c.function.arguments | tojson }}", "nothing stands before"),
    ],
)
def test_calls_that_no_parser_finds_are_not_derived(call: str, problem: str) -> None:
    with pytest.raises(NotDerived, match=problem):
        derive(template_with(call))


def test_the_mark_that_ends_turns_closes_no_reasoning() -> None:
    thought = "{% if m.reasoning_content %}<|im_start|>thought: {{ m.reasoning_content }}<|im_end|>{% endif %}"
    assert derive_reasoning(template_with("", thought)) is None
    marked = thought.replace("<|im_start|>thought: ", "<thought>").replace("<|im_end|>", "</thought>")
    assert derive_reasoning(template_with("", marked)) == ("<thought>", "</thought>")
