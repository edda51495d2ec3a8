"""Chooses the parsers that read the turns of the served model, and separates such a turn into content, reasoning and
tool calls while it grows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random, SystemRandom

from msgspec import DecodeError

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import forbid_words, word_spellings
from tokenloom.request.reasoning import HARMONY, ReasoningFormat, reasoning_format
from tokenloom.request.tool_format import ToolFormat, from_json, named_format
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..formats.call_parser import ToolParser, new_call_id, open_parser
from ..formats.harmony import PlainContent
from ..formats.message_parts import CallArguments, CallBegin, Content, MarkFilter, Part, ReasoningText
from ..formats.strict_calls import NamedCall, force, has_strict, strict_constraint
from ..formats.think import OpenReasoning, opener
from ..formats.tool_request import Tool, ToolChoice, ToolRequest
from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import GenerateRequest

UNBOUND_STRICT = "tools[].function.strict"
"""Names the member of a tool that has no effect for a model whose calls have no certain form."""
MAX_PIECE = 4096
"""Characters that parsers are given at a time: they copy the rest of a piece for each mark in it."""
AUTO = "auto"
"""Setting: what the tokenizer reports of the chat template."""

_SYSTEM = SystemRandom()
_PLAIN_ID = partial(new_call_id, None)


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """How the text of a turn is read. A request for plain text has no plan."""

    open_tools: Callable[[], ToolParser] | None = None
    """Makes a parser for one output; None: no tool may be called."""
    new_call_id: Callable[[str, Random], str] = _PLAIN_ID
    """Makes the id of a call, given its name."""
    random: Random = _SYSTEM
    """Draws the ids of calls. One with a seed draws the same ids when the answer is shaped once more."""
    parallel_calls: bool = True
    open_reasoning: OpenReasoning | None = None
    """Makes a parser for one output, given whether the prompt has opened the reasoning; None: it is text."""
    include_reasoning: bool = True
    drops: Sequence[str] = ()
    """Marks around an answer without calls, which are no text."""


@dataclass(slots=True)
class CallDelta:
    """The new part of one call."""

    index: int
    """Position among the calls of the turn."""
    call_id: str = ""
    """Set in the first delta of a call, like the name."""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class TextDelta:
    """More text for the user."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """More of the model's reasoning."""

    text: str


# A list, because one piece of output may hold the end of a call and text that follows it: an API that keeps the parts
# in order would otherwise write the text before the call's last arguments.
MessageDelta = list[TextDelta | ReasoningDelta | CallDelta]
"""The new parts of a turn in the order in which the model wrote them; empty while nothing is certain."""


def text_of(delta: MessageDelta) -> str:
    """Return the text for the user, for an API that keeps it apart from the calls."""
    return "".join([part.text for part in delta if type(part) is TextDelta])


def reasoning_of(delta: MessageDelta) -> str:
    """Return the reasoning, for an API that keeps it apart from the text."""
    return "".join([part.text for part in delta if type(part) is ReasoningDelta])


def calls_of(delta: MessageDelta) -> list[CallDelta]:
    """Return the parts of calls, for an API that keeps them apart from the text."""
    return [part for part in delta if type(part) is CallDelta]


class OutputReader:
    """Reads one output by a plan; without a plan all of it is content.

    Attributes:
        is_plain: Whether there is no plan.
    """

    def __init__(self, plan: MessagePlan | None, *, reasoning_is_open: bool, may_reason: bool) -> None:
        """The arguments are those of :class:`ParsedMessage`."""
        self._parser: ParsedMessage | None = None
        if plan is not None:
            self._parser = ParsedMessage(plan, reasoning_is_open=reasoning_is_open, may_reason=may_reason)
        self.is_plain = plan is None

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return self._parser is not None and self._parser.is_within_call

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        if self._parser is not None:
            return self._parser.feed(text, ends=ends)
        return [TextDelta(text)] if text else []


class ParsedMessage:
    """Reads one output.

    Attributes:
        num_calls: Calls that have begun.
    """

    def __init__(self, plan: MessagePlan, *, reasoning_is_open: bool, may_reason: bool = True) -> None:
        """``reasoning_is_open``: the prompt has opened the reasoning. ``may_reason``: False if the output has none."""
        self.num_calls = 0
        self._plan = plan
        self._tools: ToolParser | None = plan.open_tools and plan.open_tools()
        if plan.drops and self._tools is None:
            self._tools = MarkFilter(plan.drops)
        self._thoughts = plan.open_reasoning(reasoning_is_open) if plan.open_reasoning and may_reason else None
        self._skips_call = False
        self._call_ids: set[str] = set()

    @property
    def is_within_call(self) -> bool:
        """Return whether the output ends within a call."""
        return any(parser is not None and parser.is_within_call for parser in (self._tools, self._thoughts))

    def feed(self, text: str, *, ends: bool) -> MessageDelta:
        """Return what more text adds. ``ends``: it is the last text."""
        delta: MessageDelta = []
        while len(text) > MAX_PIECE:
            self._add(delta, self._parts(text[:MAX_PIECE], ends=False))
            text = text[MAX_PIECE:]
        self._add(delta, self._parts(text, ends=ends))
        return delta

    def _add(self, delta: MessageDelta, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(words):
                    _grow(delta, TextDelta, words)
                case ReasoningText(words):
                    if self._plan.include_reasoning:
                        _grow(delta, ReasoningDelta, words)
                case CallBegin(name, call_id):
                    self._begin_call(delta, name, call_id)
                case CallArguments(more) if self._plan.open_tools is None:
                    _grow(delta, TextDelta, more)  # of a call that the request forbids
                case CallArguments(more):
                    self._add_arguments(delta, more)

    def _parts(self, text: str, *, ends: bool) -> Sequence[Part]:
        parts: list[Part] = []
        if self._thoughts is None:
            self._read_content(text, parts)
        else:
            for part in (*self._thoughts.feed(text), *(self._thoughts.finish() if ends else ())):
                if isinstance(part, Content):
                    self._read_content(part.text, parts)
                else:
                    parts.append(part)
        if ends and self._tools is not None:
            parts += self._tools.finish()
        return parts

    def _read_content(self, text: str, parts: list[Part]) -> None:
        if self._tools is not None:
            parts += self._tools.feed(text)
        elif text:
            parts.append(Content(text))

    def _begin_call(self, delta: MessageDelta, name: str, call_id: str) -> None:
        self._skips_call = self.num_calls > 0 and not self._plan.parallel_calls
        if not self._skips_call and self._plan.open_tools is not None:
            # The model's own id is the one that its template writes again: the next turn finds the tokens in the cache.
            if not call_id or call_id in self._call_ids:
                call_id = self._plan.new_call_id(name, self._plan.random)
            self._call_ids.add(call_id)
            delta.append(CallDelta(self.num_calls, call_id, name))
            self.num_calls += 1

    def _add_arguments(self, delta: MessageDelta, text: str) -> None:
        if self._skips_call or not text:
            return
        last = delta[-1] if delta else None
        if not isinstance(last, CallDelta):
            last = CallDelta(self.num_calls - 1)
            delta.append(last)
        last.arguments += text


def _grow(delta: MessageDelta, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
    """Add text to the last part if it is of this kind, otherwise as a part of its own."""
    last = delta[-1] if delta else None
    if isinstance(last, kind):
        last.text += text
    elif text:
        delta.append(kind(text))


@dataclass(frozen=True, slots=True)
class MessagePlans:
    """Knows the formats of the served model's turns, and plans how a request's turns are read."""

    tools: ToolFormat | None = None
    """How it writes calls; None: unknown."""
    reasoning: ReasoningFormat | None = None
    """How it writes reasoning; None: it does not, or reasoning is treated as text."""
    special_marks: frozenset[str] = frozenset()
    """Marks that are special tokens, which texts otherwise do not contain."""
    hides_unused_tools: bool = False
    """Whether the model does not see tools that it may not call."""
    openings: Sequence[Sequence[int]] = ()
    """The tokens with which calls begin."""

    @classmethod
    def choose(
        cls,
        tool_parser: str,
        reasoning_parser: str,
        info: tokenizer_pb2.GetTokenizerInfoResponse,
        *,
        hides_unused_tools: bool = False,
        plugins: Sequence[str] = (),
    ) -> "MessagePlans":
        """Choose by the operator's settings or, where these are ``auto``, by what the tokenizer reports.

        An unknown name or syntax, as of a newer tokenizer, counts as none. Raises ``ValueError`` for a plugin, of the
        packages ``plugins``, that is no format.
        """
        derived = _known_format(info.tool_format_json) if tool_parser == AUTO and info.tool_format_json else None
        return cls(
            derived or named_format(info.tool_call_parser if tool_parser == AUTO else tool_parser, plugins),
            reasoning_format(reasoning_parser, info.reasoning_parser, plugins),
            frozenset(info.special_marks),
            hides_unused_tools,
        )

    async def with_openings(self, tokenizers: TokenizerClient) -> "MessagePlans":
        """Return the same, with the tokens with which calls begin."""
        if self.tools is None:
            return self
        texts = word_spellings(self.tools.openings)
        encoded = (await tokenizers.encode(texts, add_special_tokens=False)).prompts
        found = types_pb2.SamplingParams()
        forbid_words(found, [prompt.token_ids for prompt in encoded])
        return replace(self, openings=[list(sequence.ids) for sequence in found.bad_words])

    def shown(self, request: ToolRequest) -> Sequence[Tool]:
        """Return the tools that the model sees."""
        return () if self.hides_unused_tools and request.choice is ToolChoice.NONE else request.tools

    def apply(
        self, request: ToolRequest, generate_request: GenerateRequest, *, include_reasoning: bool
    ) -> tuple[MessagePlan | None, Sequence[str]]:
        """Add the constraints of a chat's tools to the request, and return how its turns are read, None: as plain text,
        and the members of the tools that have no effect.

        A call that is forced replaces the request's own constraint. Raises ``InvalidArgument`` for schemas that cannot
        be enforced, and for calls that could not be read.
        """
        unbound: Sequence[str] = ()
        form = self.tools
        if request.choice is ToolChoice.AUTO:
            unbound = self._bind_strict(generate_request.sampling, request)
        elif request.choice is not ToolChoice.NONE:  # a call is forced
            forced = force(request, self.tools)
            form, unbound = forced.form, forced.lost
            generate_request.sampling.structured_outputs.CopyFrom(forced.constraint)
        elif request.tools and self.shown(request) and not generate_request.sampling.HasField("structured_outputs"):
            # The prompt stays that of other choices, whose blocks are cached. A grammar decides what may come.
            for token_ids in self.openings:
                generate_request.sampling.bad_words.add(ids=token_ids)
        if self._keeps_special_tokens(request, form):
            generate_request.text.skip_special_tokens = False
        open_reasoning = None if self.reasoning is None else opener(self.reasoning)
        drops = () if self.tools is None else self.tools.drops
        plan = MessagePlan(open_reasoning=open_reasoning, include_reasoning=include_reasoning, drops=drops)
        if request.choice is ToolChoice.NONE:
            return (None if open_reasoning is None else plan), unbound
        return (
            replace(
                plan,
                open_tools=self._opener(request, form),
                new_call_id=partial(new_call_id, self.tools),
                parallel_calls=request.parallel,
            ),
            unbound,
        )

    def _keeps_special_tokens(self, request: ToolRequest, form: ToolFormat | None) -> bool:
        """Return whether the parsers read marks that are special tokens."""
        if self.reasoning is not None and any(
            mark in text for mark in self.special_marks for text in self.reasoning[:2]
        ):
            return True
        if form is None or request.choice is ToolChoice.NONE:
            return False
        return form.keeps_special_tokens or not self.special_marks.isdisjoint(form.openings)

    def _bind_strict(self, sampling: types_pb2.SamplingParams, request: ToolRequest) -> Sequence[str]:
        """Decode the arguments of strict tools under their schemas; return the member of tools that has no effect.

        Another constraint on the output comes first: it leaves no room for calls, unless it is a structural tag, which
        describes them itself.
        """
        if self.tools is None or not self.tools.binds_arguments:
            return (UNBOUND_STRICT,) if has_strict(request.tools) else ()
        if sampling.HasField("structured_outputs"):
            return ()
        if (constraint := strict_constraint(request, self.tools)) is not None:
            sampling.structured_outputs.CopyFrom(constraint)
        return (UNBOUND_STRICT,) if constraint is None and has_strict(request.tools) else ()

    def _opener(self, request: ToolRequest, form: ToolFormat | None) -> Callable[[], ToolParser]:
        if request.choice is ToolChoice.AUTO:
            if self.reasoning == HARMONY:
                return PlainContent
            if form is None:
                raise InvalidArgument(
                    'tool_choice "auto" needs a parser for the calls of this model, which its chat template does not '
                    "name: start the gateway with --tool-call-parser",
                    "tool_choice",
                )
        if form is None:
            assert request.named is not None
            return partial(NamedCall, request.named.name)
        return partial(open_parser, form, request.tools)


def _known_format(data: bytes) -> ToolFormat | None:
    """Return a description; None if it is of a syntax that this gateway does not read."""
    try:
        return from_json(data)
    except DecodeError:
        return None
