"""Reads from a chat template how the model's output calls tools, where that cannot be derived, and which tokens it
writes.

The signs are what the template writes for past turns. The names are those of the table of formats, as in vLLM.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from tokenloom.request.reasoning import FORMATS as REASONING_FORMATS
from tokenloom.request.reasoning import HARMONY
from tokenloom.request.tool_format import FORMATS, ToolFormat, from_json, to_json

from .chat_template import ChatTemplate
from .tool_probe import NotDerived, derive, derive_reasoning, write_calls

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REASONING_MARKS = [mark for each in REASONING_FORMATS.values() if each != HARMONY for mark in each[:2]]
_CALL_MARKS = [mark for form in FORMATS.values() for mark in form.marks]
PARSED_MARKS = tuple(dict.fromkeys([*_REASONING_MARKS, *_CALL_MARKS]))
"""What the gateway's parsers read in outputs. It comes back in the assistant's turns."""
_HARMONY_MARKS = ("<|channel|>", "<|message|>")
"""What they read in outputs of gpt-oss. None of it comes back: a template writes past messages with their headers."""

# What a template that supports tools writes around its calls or, for Llama 3, around every turn.
_TOOL_CALL_MARKS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3_json"),
    ("<|channel|>", "openai"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
)
# Marks of families whose tool calls are not JSON.
_OTHER_TOOL_FORMATS = ("<function=", "<arg_key>", "<invoke ")
_HTML = re.compile(r"</?[a-z][a-z0-9]*>")


def tool_call_parser(template: str) -> str:
    """Return the name of the parser for the calls that the template writes; empty when that is not clear."""
    if "tool_calls" not in template or any(mark in template for mark in _OTHER_TOOL_FORMATS):
        return ""
    found = [name for mark, name in _TOOL_CALL_MARKS if mark in template]
    # The template shows how past calls are written, so no operator has to name the parser. With two formats, or none, a
    # guess would turn text into calls, and the operator chooses.
    return found[0] if len(found) == 1 else ""


def described(derived: bytes, tokenizer: "Tokenizer") -> bytes:
    """Return what was derived of a template, with what the vocabulary says of the marks; empty if nothing was."""
    if not derived:
        return b""
    form = from_json(derived)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return to_json(replace(form, keeps_special_tokens=form.keeps_special_tokens or not special.isdisjoint(form.marks)))


class TemplateReport(Struct, frozen=True, omit_defaults=True):
    """What is known of how a chat template writes calls and reasoning, for an operator."""

    format: ToolFormat | None = None
    """What was derived, or the entry of the table; None: a gateway needs ``--tool-call-parser``."""
    source: str = ""
    """Where it is from: ``derived``, or the name of the entry."""
    same_as: str = ""
    """The entry of the table that describes the same calls."""
    differs: Mapping[str, str] = {}
    """Of the entry whose calls begin with the same mark: the members that are others."""
    reasoning: tuple[str, str] | None = None
    """What opens and closes the reasoning."""
    problem: str = ""
    """Why nothing could be derived."""

    def members(self) -> dict[str, Any]:
        """Return what is set, as JSON has it."""
        members: dict[str, Any] = to_builtins(self)
        return members


def report(source: str, special_tokens: Mapping[str, str]) -> TemplateReport:
    """Return what is known of a template. Raises ``ValueError`` if it is not Jinja."""
    template = ChatTemplate(source, special_tokens)
    reasoning = derive_reasoning(template)
    try:
        form = derive(template)
    except NotDerived as error:
        name = tool_call_parser(source)
        return TemplateReport(FORMATS.get(name), name, reasoning=reasoning, problem=str(error))
    near = [name for name, entry in FORMATS.items() if entry.openings == form.openings and entry.syntax == form.syntax]
    for name in near:
        if _sample(FORMATS[name]) == _sample(form):
            return TemplateReport(form, "derived", name, reasoning=reasoning)
    return TemplateReport(form, "derived", differs=_differences(form, near[0]) if near else {}, reasoning=reasoning)


def _sample(form: ToolFormat) -> str:
    """Return two calls without the blanks that no parser heeds."""
    return "".join(write_calls(form, [("f", {"a": "x", "b": "y"}), ("g", {})]).split())


def _differences(form: ToolFormat, name: str) -> dict[str, str]:
    entry = asdict(FORMATS[name])
    found = {key: f"{value!r}, not {entry[key]!r}" for key, value in asdict(form).items() if value != entry[key]}
    return {"entry": name, **found}


def special_marks(tokenizer: "Tokenizer") -> list[str]:
    """Return the marks of outputs that are special tokens, which are left out of texts."""
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and token.content in (*PARSED_MARKS, *_HARMONY_MARKS)]


def control_tokens(tokenizer: "Tokenizer", template: str) -> list[str]:
    """Return the tokens that clients must not be able to write: all added ones that are not ordinary text.

    Some vocabularies add line breaks, elements of HTML or words of their domain, which texts use every day.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special or _is_mark(token.content, template)]


def _is_mark(text: str, template: str) -> bool:
    if not text.strip("\u2581 \t\r\n") or text[0].isalnum():
        return False
    return text in template or text in PARSED_MARKS or not _HTML.fullmatch(text)
