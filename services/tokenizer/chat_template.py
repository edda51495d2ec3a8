"""Renders the chat templates of Hugging Face checkpoints: Jinja in a sandbox, with the names that templates expect.

The sandbox keeps a template from reaching Python. It does not keep a template from looping or from building gigabytes,
even while it is compiled (Jinja folds constants). A server therefore compiles and renders in ``render_worker``, a
process that can be killed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .spelled_tokens import Masks, Rendered, TokenFinder, unused_code_points

if TYPE_CHECKING:  # the render worker does not import gRPC
    from tokenloom.model_files.checkpoint import CheckpointInfo

MAX_RENDERED_CHARS = 8 << 20
"""More text than any context holds; a template that writes more is broken or hostile."""


_REASONING_MARKS = (
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<think>", "</think>"),
)
"""Of tokenloom.request.reasoning, which takes a worker time to import; the first pair is gpt-oss's."""
_THINKING = re.compile(r"\.thinking\b|[\"']thinking[\"']")
_TAIL = 32
"""Characters at the end of a text in which a mark is looked for, with the line breaks after it."""
_LONGEST_HEADER = 512
"""Characters that a template writes at most after the last message."""


class TemplateRefused(ValueError):
    """Raised when a template refuses a conversation. The message is the template's own or names what it lacks."""


class TemplateTooLong(ValueError):
    """Raised when the rendered text grew past its limit."""


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """What a template needs to write the words of each role, as probes of it have shown."""

    in_parts: frozenset[str] = frozenset()
    """Roles whose words it writes only if ``content`` is a list of parts."""
    lost: frozenset[str] = frozenset()
    """Roles whose words it writes in no form."""
    loses_later_system: bool = False
    """Whether it writes the system's words only at the beginning."""


AS_TEXT = TemplateForms()
"""Of a template that writes every role's text."""


class ChatTemplate:
    """Holds the compiled template of one checkpoint.

    Attributes:
        forms: The forms in which it gets the words of each role.
        reasoning_marks: What opens and what closes the reasoning.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """``special_tokens``: ``bos_token`` and the like. Raises ``ValueError`` when ``source`` is not Jinja."""
        self.source = source
        self.forms = AS_TEXT
        self.special_tokens = dict(special_tokens or {})
        self.knows_developers = "developer" in source
        self.reasoning_marks = next((pair for pair in _REASONING_MARKS if pair[0] in source), _REASONING_MARKS[-1])
        # Most templates call the reasoning of a past turn reasoning_content; that of gpt-oss calls it thinking.
        self._reads_thinking = bool(_THINKING.search(source)) and "reasoning_content" not in source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None

    @classmethod
    def from_checkpoint(cls, info: "CheckpointInfo") -> "ChatTemplate | None":
        """Return the template of a checkpoint; None when it has none."""
        return cls(info.chat_template, info.special_tokens) if info.chat_template else None

    def literals(self) -> list[str]:
        """Return the texts that the template writes or compares with, each once."""
        found = self._template.environment.parse(self.source).find_all(nodes.Const)
        return list(dict.fromkeys(node.value for node in found if isinstance(node.value, str)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> str:
        """Return the conversation as the model reads it, to be encoded without adding special tokens.

        Args:
            messages, tools: In OpenAI's form. A template that does not mention developers gets their turns as the
                system's, which OpenAI's API defines as the same: most templates would leave them out.
                Words that it writes in no form are refused.
            continue_final_message: End with the words of the last message, so that the model continues them.
            template_kwargs: Arguments that the template documents; they cannot replace the names given here.

        Raises ``TemplateRefused`` or ``TemplateTooLong``.
        """
        context: dict[str, Any] = {"documents": None, **(template_kwargs or {}), **self.special_tokens}
        if not self.knows_developers:
            # Codex CLI and newer OpenAI clients send their instructions with this role. Templates leave out the turns
            # of roles that they do not know, so the model would never see them.
            messages = list(map(_without_developer, messages))
        if self._reads_thinking:
            messages = list(map(_with_thinking, messages))
        end = ""
        if continue_final_message:
            end = next(unused_code_points([messages, tools, template_kwargs]))
            messages = [*messages[:-1], _ended(messages[-1], end)]
        if self.forms != AS_TEXT:
            messages = _shaped(messages, self.forms)
        context.update(messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt)
        try:
            text = self._render(context, max_chars)
        except TemplateRefused:
            # A past call that was cut or malformed has a text as its arguments. Templates that walk through the members
            # of an object cannot write it.
            if not any(map(_has_text_arguments, messages)):
                raise
            context["messages"] = list(map(_without_text_arguments, messages))
            text = self._render(context, max_chars)
        return _before_mark(text, end) if end else text

    def _render(self, context: Mapping[str, Any], max_chars: int) -> str:
        parts: list[str] = []
        length = 0
        try:
            # Rendered piece by piece: a template in a loop is stopped at the limit, instead of after it has built the
            # whole text.
            for part in self._template.generate(context):
                length += len(part)
                if length > max_chars:
                    raise TemplateTooLong(f"the rendered conversation is longer than {max_chars} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise TemplateRefused(error.message or type(error).__name__) from None
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, TemplateTooLong):
                raise
            # The template met values of a type or shape that it does not expect.
            raise TemplateRefused(f"the chat template cannot take this conversation: {error}") from None
        return "".join(parts)


class MaskingTemplate:
    """Renders conversations in which the tokens that clients spell out are masked."""

    def __init__(self, template: ChatTemplate, finder: TokenFinder, parsed_marks: Sequence[str]) -> None:
        """``finder``: of the tokens to mask. ``parsed_marks``: those that remain in the assistant's turns."""
        self._template = template
        self._finder = finder
        self._parsed_marks = parsed_marks

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        json_text: str | None = None,
        **options: bool,
    ) -> Rendered:
        """Return what :meth:`ChatTemplate.render` returns, with masks.

        ``json_text``: all of it as JSON, which is searched sooner than its values; None: there is none.
        """
        tokens: dict[str, str] = {}
        if json_text is None or self._finder.may_be_in(json_text):
            masks = Masks(self._finder, [messages, tools, template_kwargs], self._parsed_marks)
            messages, tools = masks.messages(messages), masks.value(tools)
            template_kwargs, tokens = masks.value(template_kwargs), masks.tokens
        text = self._template.render(messages, tools, template_kwargs=template_kwargs, **options)
        # The header of the turn to come is short: a mark far before it, as in a system's text, is not looked into.
        marks = self._template.reasoning_marks
        start = _last_mark(text if options.get("continue_final_message") else text[-_LONGEST_HEADER:], marks)
        if start != "NONE" and not text[-_TAIL:].rstrip().endswith(marks):
            # The mark stands before the end, in an earlier turn's text or in the one that the model continues.
            earlier = self._len_of_earlier_turns(text, messages, tools, template_kwargs, options)
            start = _last_mark(text[earlier:], marks)
        return Rendered(text, tokens, start)

    def _len_of_earlier_turns(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        options: Mapping[str, bool],
    ) -> int:
        """Return how much of a rendered text is what stands before the turn that the model writes or continues."""
        earlier = messages[:-1] if options.get("continue_final_message") else messages
        try:
            before = self._template.render(earlier, tools, add_generation_prompt=False, template_kwargs=template_kwargs)
        except TemplateRefused:
            return 0  # it takes no conversation that ends there
        return _len_of_same(text, before)


def _len_of_same(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    # By halves: slices are compared at the speed of C, and 1 MB by its characters took 0.3 s.
    same, most = 0, min(len(one), len(other))
    while same < most:
        middle = (same + most + 1) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            most = middle - 1
    return same


class _GenerationTag(Extension):
    """Accepts ``{% generation %}…{% endgeneration %}``, which marks the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

    def _contents(self, caller: Callable[[], str]) -> str:
        return caller()


def _last_mark(text: str, marks: tuple[str, str]) -> str:
    """Return how a text leaves the reasoning: a name of ``ReasoningStart``."""
    opened, closed = map(text.rfind, marks)
    if opened == closed:
        return "NONE"
    return "OPEN" if opened > closed else "CLOSED"


def _without_developer(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose reasoning has the name that the template knows, unless a call's turn also says something:
    the template has one place for both."""
    reasoning = message.get("reasoning_content")
    if not reasoning or "thinking" in message or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": reasoning}


def _has_text_arguments(message: Mapping[str, Any]) -> bool:
    return any(map(_is_text_call, message.get("tool_calls") or ()))


def _is_text_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("arguments"), str)


def _without_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn whose calls have no arguments where they are a text."""
    if not _has_text_arguments(message):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}} if _is_text_call(call) else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _shaped(messages: Sequence[Mapping[str, Any]], forms: TemplateForms) -> list[Mapping[str, Any]]:
    """Return the messages in the forms that keep their words. Raises ``TemplateRefused`` for those without any."""
    shaped = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str) and content.strip():
            is_late = role == "system" and index > 0 and forms.loses_later_system
            if role in forms.lost or is_late:
                where = " after the first" if is_late and role not in forms.lost else ""
                raise TemplateRefused(f"the chat template of this model leaves out the turns of role {role!r}{where}")
            if role in forms.in_parts:
                message = {**message, "content": [{"type": "text", "text": content}]}
        shaped.append(message)
    return shaped


def _ended(message: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    # Searched for by its words alone, the end was found in the template's own marks, which may hold the same letters.
    words = message.get("content")
    if not isinstance(words, str) or not words.strip():
        raise TemplateRefused(_NO_END)
    return {**message, "content": f"{words}{mark} "}


def _before_mark(text: str, mark: str) -> str:
    """Return the rendered text up to the end of the last message's words."""
    at = text.rfind(mark)
    if at < 0:
        raise TemplateRefused(_NO_END)
    words = text[:at].replace(f"{mark} ", "").replace(mark, "")  # some templates write a turn twice
    # A template that trims the space after the mark would have trimmed the space after the words.
    return words if text.startswith(" ", at + 1) else words.rstrip()


_NO_END = "continue_final_message needs a last message whose text the chat template writes as it is"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    # Jinja's generator of filler text makes megabytes from one short expression.
    del environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, and models were not trained on that.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
