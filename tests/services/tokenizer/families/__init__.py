"""Templates of families of models, with the marks of the published ones, and what the tests know of them."""

from functools import cache
from pathlib import Path

from tokenloom.request.tool_format import FORMATS, ToolFormat
from tokenloom.services.tokenizer.chat_template import ChatTemplate
from tokenloom.services.tokenizer.output_format import tool_call_parser
from tokenloom.services.tokenizer.tool_probe import NotDerived, derive

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("*.jinja"))
"""The names of the files. A family is added by a file."""
BY_NAME = ("kimi_k2",)
"""Families whose templates do not write the name of a call: their ids hold it."""


@cache
def template_of(family: str) -> ChatTemplate:
    source = (Path(__file__).parent / f"{family}.jinja").read_text()
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


@cache
def form_of(family: str) -> ToolFormat:
    """What the gateway gets: what is derived of the template, or the entry of the table that it has a sign of."""
    template = template_of(family)
    try:
        return derive(template)
    except NotDerived:
        return FORMATS[tool_call_parser(template.source)]
