"""Describes how a family of models writes tool calls, as data.

The tokenizer derives the description from the chat template. The gateway's parser and its grammars read nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, ValidationError, convert, json

from tokenloom.process.plugins import load

TOOL_PARSERS = (
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "functiongemma",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "hermes",
    "hunyuan_a13b",
    "internlm",
    "jamba",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
    "xlam",
)
"""Values of ``--tool-call-parser`` that name what is built in; the names are those of vLLM's parsers."""
Syntax = Literal["json", "named", "pairs", "python", "bare", "messages"]
ID, INDEX, NAME, HEX, ALNUM, KIND = "⟨id⟩", "⟨index⟩", "⟨name⟩", "⟨hex⟩", "⟨alnum⟩", "⟨kind⟩"
"""Places in a text for what differs from call to call: an id, a number, the name, 24 digits, 9 letters or digits, what
is said of the kind of a value."""


_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


class ToolFormat(Struct, frozen=True, omit_defaults=True):
    """How calls are written: one after the other, or together in a section.

    A call is ``call[0] before_name NAME after_name ARGUMENTS after_arguments call[1]``. Blanks at the ends of these
    texts are what templates write; the parser reads calls with any others.
    """

    syntax: Syntax = "json"
    """What a call consists of. ``json``: an object with members for the name and the arguments. The others write the
    name as text. ``named``: then the arguments as a JSON object; ``pairs``: then each argument between marks;
    ``python``: as a call of Python; ``bare``: as an object whose keys have no quotes. ``messages``: of gpt-oss, whose
    calls are messages with a header."""
    section: tuple[str, str] = ("", "")
    """What stands before the first and after the last of several calls."""
    call: tuple[str, str] = ("", "")
    separator: str = ""
    """What stands between two calls."""
    before_name: str = ""
    after_name: str = ""
    after_arguments: str = ""
    pair: tuple[str, str, str] = ("", "", "")
    """Of ``pairs``: what stands before a key, between it and its value, and after the value."""
    kinds: tuple[str, str] = ("", "")
    """Of ``pairs``: what stands in the place for the kind if the value is a text, and if it is not."""
    string_mark: str = ""
    """Of ``bare``: what stands on both sides of a string instead of quotation marks."""
    optional_open: str = ""
    """What may stand before calls that otherwise have no opening mark."""
    drops: tuple[str, ...] = ()
    """Marks around answers that are no text for the user."""
    call_id: str = f"call_{HEX}"
    """The id of a call that the model has not given one; a template may accept no other form."""
    keeps_special_tokens: bool = False
    """Whether the marks are special tokens, which texts otherwise do not contain."""
    varies: bool = False
    """Whether versions of the family write calls in several ways, so that none of them can be demanded."""

    @property
    def marks(self) -> list[str]:
        """All marks that may be tokens of a vocabulary. Those of messages are none: templates write them as headers."""
        if self.syntax == "messages":
            return []
        texts = (*self.section, *self.call, self.before_name, self.after_name, self.after_arguments, *self.pair)
        text = " ".join((*texts, self.optional_open, *self.drops))
        return [*dict.fromkeys(_MARK.findall(text)), *([self.string_mark] if self.string_mark else [])]

    @property
    def is_list(self) -> bool:
        """Whether the calls of a section are the items of a list."""
        return self.section[0].rstrip().endswith("[")

    @property
    def is_marked(self) -> bool:
        """Whether calls begin with a mark; otherwise the whole output consists of calls."""
        return bool(self.call[0].strip() or self.section[0].strip("[ \t\r\n") or self.before_name.lstrip()[:1] == "<")

    @property
    def binds_arguments(self) -> bool:
        """Whether a grammar can hold the arguments to a schema from where the model begins a call."""
        return self.demands_calls and (self.is_marked or bool(self.before_name))

    @property
    def demands_calls(self) -> bool:
        """Whether a grammar can make an output consist of calls."""
        return not self.varies and self.syntax in ("json", "named", "pairs", "python")

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts with which calls begin, and ordinary answers do not."""
        if self.syntax == "messages":
            return (f" {self.before_name}",)
        if self.is_marked:
            return (first_mark(self.section[0].strip() or self.call[0].strip() or self.before_name.strip()),)
        return tuple(text for text in (self.optional_open, self.before_name) if text)


def first_mark(text: str) -> str:
    """Return the mark with which a text begins, as ``<tool_call>``. Words are one mark: a single one is in answers."""
    closing = {"<": ">", "[": "]"}.get(text[:1])
    if closing is None:
        return text
    end = text.find(closing) + 1
    return text[:end] if end else text.split()[0]


def to_json(form: ToolFormat) -> bytes:
    """Return a description as a message carries it."""
    return json.encode(form)


def from_json(data: bytes) -> ToolFormat:
    """Return the description of a message. Members of newer versions are left out."""
    return json.decode(data, type=ToolFormat)


_OBJECT = ('{"name": "', '", "arguments": ', "}")


def _objects(section: tuple[str, str], separator: str = ", ", *, keeps_special_tokens: bool = False) -> ToolFormat:
    """Return a format that writes a list of objects in a section."""
    return ToolFormat("json", section, ("", ""), separator, *_OBJECT, keeps_special_tokens=keeps_special_tokens)


def _deepseek(before_name: str, after_name: str, after_arguments: str, separator: str) -> ToolFormat:
    section, call = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    return ToolFormat(
        "named", section, call, separator, before_name, after_name, after_arguments, keeps_special_tokens=True
    )


def _functions(opening: str, closing: str) -> ToolFormat:
    """Return a format that writes ``<function=`` and ``<parameter=``."""
    return ToolFormat(
        "pairs",
        call=(f"{opening}\n", f"\n{closing}"),
        separator="\n",
        before_name="<function=",
        after_name=">\n",
        after_arguments="</function>",
        pair=("<parameter=", ">\n", "\n</parameter>\n"),
    )


def _arg_keys(blank: str) -> ToolFormat:
    pair = ("<arg_key>", f"</arg_key>{blank}<arg_value>", f"</arg_value>{blank}")
    return ToolFormat("pairs", call=("<tool_call>", "</tool_call>"), separator="\n", after_name=blank, pair=pair)


def _python(section: tuple[str, str], separator: str, optional_open: str = "", drops: Sequence[str] = ()) -> ToolFormat:
    return ToolFormat(
        "python",
        section,
        separator=separator,
        after_name="(",
        after_arguments=")",
        optional_open=optional_open,
        drops=tuple(drops),
        keeps_special_tokens=bool(optional_open),
    )


def _gemma(opening: str, closing: str, string_mark: str) -> ToolFormat:
    return ToolFormat(
        "bare",
        call=(opening, closing),
        before_name="call:",
        after_name="{",
        after_arguments="}",
        string_mark=string_mark,
        keeps_special_tokens=True,
    )


HERMES = ToolFormat("json", ("", ""), ("<tool_call>\n", "\n</tool_call>"), "\n", *_OBJECT)
FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    "deepseek_v31": _deepseek("", "<｜tool▁sep｜>", "", ""),
    "deepseek_v32": ToolFormat(
        "pairs",
        ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        before_name='<｜DSML｜invoke name="',
        after_name='">\n',
        after_arguments="</｜DSML｜invoke>\n",
        pair=('<｜DSML｜parameter name="', f'" string="{KIND}">', "</｜DSML｜parameter>\n"),
        kinds=("true", "false"),
    ),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "glm45": _arg_keys("\n"),
    "glm47": _arg_keys(""),
    "granite": _objects(("<|tool_call|>[", "]"), keeps_special_tokens=True),
    "hermes": HERMES,
    "hunyuan_a13b": _objects(("<tool_calls>[", "]</tool_calls>")),
    "internlm": ToolFormat(
        "json",
        call=("<|action_start|><|plugin|>\n", "<|action_end|>"),
        before_name=_OBJECT[0],
        after_name='", "parameters": ',
        after_arguments="}",
        keeps_special_tokens=True,
    ),
    "jamba": _objects(("<tool_calls>[\n", "\n]</tool_calls>"), ",\n"),
    "kimi_k2": ToolFormat(
        "named",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        before_name="functions.",
        after_name=f":{INDEX}<|tool_call_argument_begin|>",
        call_id=f"functions.{NAME}:{INDEX}",
        keeps_special_tokens=True,
    ),
    "llama3_json": ToolFormat(
        "json",
        separator="; ",
        before_name=_OBJECT[0],
        after_name='", "parameters": ',
        after_arguments="}",
        optional_open="<|python_tag|>",
        keeps_special_tokens=True,
    ),
    "llama4_pythonic": _python(("[", "]"), ", ", "<|python_start|>", ("<|python_end|>",)),
    "minimax_m2": ToolFormat(
        "pairs",
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        before_name='<invoke name="',
        after_name='">\n',
        after_arguments="</invoke>\n",
        pair=('<parameter name="', '">', "</parameter>\n"),
    ),
    "mistral": ToolFormat(
        "named",
        ("[TOOL_CALLS]", ""),
        after_name=f"[CALL_ID]{ID}[ARGS]",
        call_id=ALNUM,
        keeps_special_tokens=True,
        varies=True,
    ),
    "olmo3": _python(("<function_calls>", "</function_calls>"), "\n"),
    "openai": ToolFormat(
        "messages",
        before_name="to=functions.",
        after_name="<|channel|>commentary json<|message|>",
        after_arguments="<|call|>",
        keeps_special_tokens=True,
        varies=True,
    ),
    "phi4_mini_json": _objects(("functools[", "]")),
    "pythonic": _python(("[", "]"), ", "),
    "qwen3_coder": _functions("<tool_call>", "</tool_call>"),
    "seed_oss": _functions("<seed:tool_call>", "</seed:tool_call>"),
    "xlam": _objects(("[", "]")),
}
"""The formats of families, by the names that operators use."""


def named_format(parser: str, plugins: Sequence[str] = ()) -> ToolFormat | None:
    """Return the format that an operator names; None: the name is unknown. Raises ``ValueError`` for a plugin, of the
    packages ``plugins``, that is no format: an object of the fields of :class:`ToolFormat`, or one of these."""
    if ":" not in parser:
        return FORMATS.get(parser)
    value = load("tool_formats", parser, plugins)
    try:
        return value if isinstance(value, ToolFormat) else convert(value, ToolFormat, strict=True)
    except ValidationError as error:
        raise ValueError(f"the plugin {parser} (tool_formats) is no format: {error}") from None


REQUIRED = ToolFormat("json", ("[", "]"), ("", ""), ", ", '{"name": "', '", "parameters": ', "}")
"""How calls are written that a client demands of a model whose format is unknown."""
