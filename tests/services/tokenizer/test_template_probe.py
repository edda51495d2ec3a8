"""Tests that each role's words reach the model in the form that the template reads, or are refused by name."""

import pytest

from tests.services.tokenizer.test_renderer import job
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import errors
from tokenloom.services.tokenizer.chat_template import AS_TEXT, ChatTemplate, TemplateForms, TemplateRefused
from tokenloom.services.tokenizer.renderer import Renderer
from tokenloom.services.tokenizer.template_probe import probe_forms

TEXT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}\n{% endfor %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
GUARD = (  # the user's turn in parts, the system's as text; no other roles
    "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content[0]['text'] }}\n"
    "{% elif m.role == 'system' %}{{ m.content | trim }}\n{% endif %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}{{ m.content }}{% endfor %}"
)
PREFIXED = "{% for m in messages %}{% if m.content.startswith('query: ') %}{{ m.content }}{% endif %}{% endfor %}"
SPLIT = "{% for m in messages %}{{ m.content.split('###')[1] }}{% endfor %}"
LENGTH = "{% for m in messages %}{% if m.content | length > 60 %}{{ m.content }}{% endif %}{% endfor %}"
RAISES = "{{ raise_exception('not without an image') }}"
LOST = "{% for m in messages %}{{ m.role }}{% endfor %}"
ALL = frozenset({"user", "assistant", "system", "tool"})


@pytest.mark.parametrize(
    ("source", "forms"),
    [
        (TEXT, AS_TEXT),
        (PARTS, TemplateForms(in_parts=ALL)),
        (EITHER, AS_TEXT),
        (GUARD, TemplateForms(frozenset({"user"}), frozenset({"assistant", "tool"}))),
        (FIRST_SYSTEM, TemplateForms(loses_later_system=True)),
        (PREFIXED, AS_TEXT),
        (SPLIT, AS_TEXT),
        (LENGTH, AS_TEXT),
        (RAISES, AS_TEXT),
        (TEXT.replace("content }}", "content | upper }}"), AS_TEXT),
        ("{{ messages | tojson }}", AS_TEXT),
        ("zephyrix " + TEXT, AS_TEXT),
    ],
)
def test_the_form_that_keeps_the_words_is_chosen(source: str, forms: TemplateForms) -> None:
    assert probe_forms(ChatTemplate(source)) == forms


def test_the_demo_models_template_writes_every_role() -> None:
    template = ChatTemplate.from_checkpoint(CheckpointInfo.load(DEMO_MODEL))
    assert template is not None
    assert probe_forms(template) == AS_TEXT


def test_a_template_that_loses_the_users_words_in_every_form_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out the words of a user's turn"):
        probe_forms(ChatTemplate(LOST))


def test_turns_are_rendered_in_their_forms_and_lost_ones_refused_by_name() -> None:
    template = ChatTemplate(GUARD)
    template.forms = probe_forms(template)
    turns = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "hi"}]
    assert template.render(turns) == "Judge.\nUser: hi\n"
    with pytest.raises(TemplateRefused, match=r"leaves out the turns of role 'tool'$"):
        template.render([*turns, {"role": "tool", "content": "7"}])
    assert template.render([*turns, {"role": "tool", "content": " "}])  # nothing is lost with it

    template = ChatTemplate(FIRST_SYSTEM)
    template.forms = probe_forms(template)
    assert template.render(turns) == "Judge.hi"
    with pytest.raises(TemplateRefused, match="role 'system' after the first"):
        template.render([*turns, turns[0]])


def test_a_developer_is_refused_where_the_template_knows_the_role_and_leaves_it_out() -> None:
    template = ChatTemplate("{# developer #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    template.forms = probe_forms(template)
    with pytest.raises(TemplateRefused, match="role 'developer'"):
        template.render([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}])


async def test_a_server_chooses_at_its_start_and_does_not_start_without_the_users_words() -> None:
    renderer = Renderer(PARTS, {}, num_workers=1, seconds=60)
    await renderer.start()
    assert (await renderer.render(job("hello"))).text == "[user] hello"
    await renderer.close()
    with pytest.raises(errors.InvalidArgument, match="leaves out the words of a user's turn"):
        await Renderer(LOST, {}, num_workers=1, seconds=60).start()


async def test_what_a_user_spells_out_is_masked_while_the_template_reads_it() -> None:
    source = "<s>{% for m in messages %}{{ m.content.replace('<s>', 'broken') }}{% endfor %}"
    renderer = Renderer(source, {}, control_tokens=["<s>"], num_workers=1, seconds=60)
    await renderer.start()
    rendered = await renderer.render(job("a <s> b"))
    await renderer.close()
    (mask,) = rendered.masks
    assert rendered.masks == {mask: "<s>"}
    assert rendered.text == f"<s>a {mask} b"
