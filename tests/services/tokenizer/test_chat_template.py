"""Tests that rendered text equals that of transformers, and that a template's mistakes are reported as such."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.reasoning import FORMATS as REASONING_FORMATS
from tokenloom.request.reasoning import HARMONY as HARMONY_FORMAT
from tokenloom.request.reasoning import format_of_template
from tokenloom.services.tokenizer.chat_template import ChatTemplate, MaskingTemplate, TemplateRefused, TemplateTooLong
from tokenloom.services.tokenizer.output_format import tool_call_parser
from tokenloom.services.tokenizer.spelled_tokens import TokenFinder

USER = {"role": "user", "content": "What is 2 + 2? <b>é</b>"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "4"}, USER],
    [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers> & é.", "parameters": {}}}]

# What checkpoints in the field write: whitespace control, loop controls, macros, namespaces, tojson's options.
FIELD_TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'system' %}\n    {% continue %}\n  {% endif %}\n"
    "[{{ m['role'] }}] {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "{% macro say(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }} {{ say(m) }}"
    "{% if loop.index == 2 %}{% break %}{% endif %}"
    "{% endfor %}",
    "{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages[0].content.split(' ') | join('|') }}{{ documents is none }}{{ custom | default('none') }}",
]


@pytest.fixture(scope="session")
def reference() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="session")
def demo() -> ChatTemplate:
    template = ChatTemplate.from_checkpoint(CheckpointInfo.load(DEMO_MODEL))
    assert template is not None
    return template


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ c.arguments if c.arguments is string else c.arguments | tojson }}", '{"a": "Par;{"b": 1}'),
        ("{{ c.arguments | tojson }}", '"{\\"a\\": \\"Par";{"b": 1}'),
        ("{% for k, v in c.arguments.items() %}{{ k }}={{ v }}{% endfor %}", ";b=1"),
        ("{% for k, v in c.arguments | items %}{{ k }}={{ v }}{% endfor %}", ";b=1"),
    ],
)
def test_arguments_that_are_a_text_are_written_or_left_out(source: str, rendered: str) -> None:
    loop = "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
    template = ChatTemplate(f"{loop}{source};{{% endfor %}}{{% endfor %}}")
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ('{"a": "Par', {"b": 1})]
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert template.render(turns) == f"{rendered};"


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for m in messages %}{{ m.role }} {{ m.content }};{% endfor %}", "system Be brief.;"),
        ("{% for m in messages if m.role in ('system', 'developer') %}{{ m.role }};{% endfor %}", "developer;"),
    ],
)
def test_a_developer_is_the_system_to_templates_that_do_not_know_the_role(source: str, rendered: str) -> None:
    assert ChatTemplate(source).render([{"role": "developer", "content": "Be brief."}]) == rendered


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_demo_models_template_renders_as_in_transformers(
    demo: ChatTemplate, reference: Any, messages: list[Any], tools: list[Any] | None, add_generation_prompt: bool
) -> None:
    ours = demo.render(messages, tools, add_generation_prompt=add_generation_prompt)
    theirs = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    assert ours == theirs


@pytest.mark.parametrize("source", FIELD_TEMPLATES)
def test_templates_of_the_field_render_as_in_transformers(reference: Any, source: str) -> None:
    special = {"eos_token": reference.eos_token, "pad_token": reference.pad_token}
    for messages in CONVERSATIONS[:2]:
        ours = ChatTemplate(source, special).render(messages, TOOLS, template_kwargs={"custom": 7})
        theirs = reference.apply_chat_template(
            messages, tools=TOOLS, chat_template=source, add_generation_prompt=True, tokenize=False, custom=7
        )
        assert ours == theirs


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", "no attribute 'missing'"),
        ("{{ messages + 1 }}", "cannot take this conversation"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ lipsum() }}", "undefined"),
        ("{{ 1 // 0 }}", "cannot take this conversation"),
    ],
)
def test_what_a_template_refuses(source: str, message: str) -> None:
    with pytest.raises(TemplateRefused, match=message):
        ChatTemplate(source).render([USER])


def test_output_is_capped() -> None:
    endless = ChatTemplate("{% for i in range(99999) %}{% for j in range(99999) %}spam{% endfor %}{% endfor %}")
    with pytest.raises(TemplateTooLong):
        endless.render([USER], max_chars=1000)


def test_callers_cannot_replace_the_conversation(demo: ChatTemplate) -> None:
    assert demo.render([USER], template_kwargs={"messages": []}) == demo.render([USER])


def test_a_template_that_is_no_jinja_is_named_as_such() -> None:
    with pytest.raises(ValueError, match="not valid Jinja: line 1"):
        ChatTemplate("{% for %}")


def test_a_checkpoint_without_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert ChatTemplate.from_checkpoint(CheckpointInfo.load(tmp_path)) is None


BEGUN = [USER, {"role": "assistant", "content": " The answer\nis "}]


@pytest.mark.parametrize("source", [None, FIELD_TEMPLATES[0], FIELD_TEMPLATES[3]])
def test_a_message_is_continued_as_in_transformers(reference: Any, demo: ChatTemplate, source: str | None) -> None:
    template = demo if source is None else ChatTemplate(source, demo.special_tokens)
    expected = reference.apply_chat_template(
        BEGUN, chat_template=template.source, tokenize=False, continue_final_message=True
    )
    ours = template.render(BEGUN, add_generation_prompt=False, continue_final_message=True)
    assert ours == expected
    assert ours.rstrip().endswith("The answer\nis")


@pytest.mark.parametrize("words", ["", " \n", "lost"])
def test_a_message_that_the_template_does_not_write_cannot_be_continued(words: str) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": words}]
    with pytest.raises(TemplateRefused, match="continue_final_message"):
        template.render(turns, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("words", ["|", "end", "i", "<", "_", "<|im_end|>", "assistant", "\n\n.", "4 + "])
def test_words_that_the_templates_marks_hold_too_are_continued(demo: ChatTemplate, words: str) -> None:
    turns = [USER, {"role": "assistant", "content": words}]
    begun = demo.render([USER], add_generation_prompt=True)
    assert demo.render(turns, add_generation_prompt=False, continue_final_message=True) == begun + words


def test_a_template_that_writes_a_turn_twice_is_continued_after_the_last() -> None:
    template = ChatTemplate("{{ messages[-1].content }}|{% for m in messages %}{{ m.content }}/{% endfor %}")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]
    assert template.render(turns, add_generation_prompt=False, continue_final_message=True) == "a|hi/a"


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ opening }}{% endif %}"
)
TAG = {"role": "user", "content": "What is <think>, and </think>?"}
HALF = {"role": "user", "content": "What is <think>?"}


@pytest.mark.parametrize(
    ("turns", "opening", "continues", "expected"),
    [
        ([USER], "", False, "NONE"),
        ([USER], "<think>\n", False, "OPEN"),
        ([USER], "<think>\nWell, ", False, "OPEN"),
        ([USER], "<think>\n\n</think>\n\n", False, "CLOSED"),
        ([TAG], "", False, "NONE"),
        ([HALF], "", False, "NONE"),
        ([HALF], "<think>", False, "OPEN"),
        ([HALF], "<think></think>", False, "CLOSED"),
        ([USER, {"role": "assistant", "content": "<think>x</think>y"}, USER], "", False, "NONE"),
        ([HALF, {"role": "assistant", "content": "<think>Hm"}], "", True, "OPEN"),
        ([HALF, {"role": "assistant", "content": "<think>x</think>y"}], "", True, "CLOSED"),
        ([HALF, {"role": "assistant", "content": "yes"}], "", True, "NONE"),
        ([USER, {"role": "assistant", "content": "<think>"}], "", True, "OPEN"),
    ],
)
def test_only_marks_of_the_last_turn_open_or_close_reasoning(
    turns: list[Any], opening: str, continues: bool, expected: str
) -> None:
    template = MaskingTemplate(ChatTemplate(THINKS), TokenFinder([]), ())
    options = {"add_generation_prompt": not continues, "continue_final_message": continues}
    rendered = template.render(turns, None, {"opening": opening}, None, **options)
    assert rendered.reasoning_start == expected


def test_a_mark_far_before_the_end_needs_no_second_rendering() -> None:
    template = ChatTemplate(THINKS)
    rendered = list[str]()
    render = template.render
    template.render = lambda *args, **kwargs: rendered.append(render(*args, **kwargs)) or rendered[-1]  # type: ignore[method-assign,func-returns-value]
    masking = MaskingTemplate(template, TokenFinder([]), ())
    system = {"role": "system", "content": "Think between <think> and </think>."}
    long = {"role": "user", "content": "word " * 200}
    assert masking.render([system, long], None, None).reasoning_start == "NONE"
    assert len(rendered) == 1
    assert masking.render([system, USER], None, None).reasoning_start == "NONE"
    assert len(rendered) == 3


# Our own, with the marks and the names of gpt-oss's template.
HARMONY = """
{%- for m in messages %}
  {%- if m.role == "assistant" and m.tool_calls %}
    {%- if m.content and m.thinking %}{{ raise_exception("not both") }}{% endif %}
    {%- if m.content or m.thinking %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ (m.content or m.thinking) ~ "<|end|>" }}
    {%- endif %}
    {%- for call in m.tool_calls %}
      {{- "<|start|>assistant to=functions." ~ call.function.name ~ "<|channel|>commentary json<|message|>" }}
      {{- call.function.arguments | tojson ~ "<|call|>" }}
    {%- endfor %}
  {%- else %}
    {{- "<|start|>" ~ m.role ~ ("<|channel|>final" if m.role == "assistant" else "") ~ "<|message|>" }}
    {{- m.content ~ "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    ("turn", "analysis"),
    [
        ({"content": "", "reasoning_content": "Hm."}, "Hm."),
        ({"content": "", "thinking": "Hm.", "reasoning_content": "no"}, "Hm."),
        ({"content": "I add.", "reasoning_content": "Hm."}, "I add."),  # the template has one place for both
        ({"content": ""}, ""),
    ],
)
def test_reasoning_before_a_call_has_the_name_that_the_template_knows(turn: dict[str, Any], analysis: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": CALLS, **turn}]
    found = ChatTemplate(HARMONY).render(messages)
    head = f"<|start|>assistant<|channel|>analysis<|message|>{analysis}<|end|>" if analysis else ""
    call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert found == f"<|start|>user<|message|>hi<|end|>{head}{call}<|start|>assistant"


@pytest.mark.parametrize(
    ("last", "options", "start"),
    [("user", {}, "NONE"), ("assistant", {"add_generation_prompt": False, "continue_final_message": True}, "CLOSED")],
)
def test_how_a_prompt_of_gpt_oss_leaves_the_reasoning(last: str, options: dict[str, bool], start: str) -> None:
    """A header of an earlier turn says nothing; that of the turn that the model continues does."""
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user", "assistant")]
    template = ChatTemplate(HARMONY)
    assert template.reasoning_marks == HARMONY_FORMAT[:2]
    for reasoning in REASONING_FORMATS.values():
        assert ChatTemplate("".join(reasoning[:2])).reasoning_marks == reasoning[:2]
    masking = MaskingTemplate(template, TokenFinder([]), [])
    rendered = masking.render(messages[: 4 if last == "assistant" else 3], None, None, **options)
    assert rendered.reasoning_start == start


def test_gpt_oss_is_known_by_the_marks_of_its_template() -> None:
    assert tool_call_parser(HARMONY) == "openai"
    assert format_of_template(HARMONY) == "openai_gptoss"
