"""Finds the reasoning at the beginning of an output by its tokens.

Whether a token belongs to the reasoning is a function of the prompt and of the tokens before it, and of nothing else:
after a preemption, a hand-over or a retry the same tokens give the same state.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

from msgspec import Struct

from tokenloom.process.plugins import load

PARSERS = ("auto", "none", "cohere_command", "deepseek_r1", "gemma4", "mistral", "openai_gptoss", "qwen3", "seed_oss")
"""Values of ``--reasoning-parser`` that name what is built in."""
THINK_START, THINK_END = "<think>", "</think>"
MAX_BLANK_TOKENS = 2
"""Tokens of line breaks that a chat template writes after reasoning that it has closed."""


class ReasoningStart(IntEnum):
    """Says how a prompt leaves the reasoning; the values are those of the protos."""

    BY_MARKS = 0
    """The last mark in the prompt decides: it is not known where its last turn begins."""
    NONE = 1
    """The last turn has no mark. Those of earlier turns, such as a mark in a user's text, say nothing."""
    OPEN = 2
    CLOSED = 3


class ReasoningFormat(NamedTuple):
    """How a family of models writes its reasoning."""

    start: str
    end: str
    begins_inside: bool
    """Whether an output begins with reasoning even if neither the prompt nor the model writes the start mark."""
    aside: str = ""
    """What begins calls and texts within the reasoning that do not count as such; the next start mark ends them."""


HARMONY_REASONS = "<|channel|>analysis"
# Not the end of the analysis, which another one, or a call, may follow: a constraint binds the answer, whose header
# would break it.
HARMONY = ReasoningFormat(
    f"{HARMONY_REASONS}<|message|>", "<|channel|>final<|message|>", begins_inside=True, aside="<|channel|>commentary"
)
"""The format of gpt-oss: all before the message for the user is reasoning."""

FORMATS: Mapping[str, ReasoningFormat] = {
    # Its first templates leave the start mark to the model, which may omit it.
    "deepseek_r1": ReasoningFormat(THINK_START, THINK_END, begins_inside=True),
    "qwen3": ReasoningFormat(THINK_START, THINK_END, begins_inside=False),
    "openai_gptoss": HARMONY,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", begins_inside=False),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", begins_inside=False),
    "cohere_command": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", begins_inside=False),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", begins_inside=False),
}
"""The known formats, by the names that operators use."""
_SIGNS = {FORMATS[name].start: name for name in ("seed_oss", "mistral", "cohere_command", "gemma4")}


class ReasoningMarks(Struct, frozen=True):
    """A format in the tokens of one vocabulary. A mark may have several tokens, which are found as a sequence."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    begins_inside: bool
    aside: tuple[int, ...] = ()
    """Empty: the format has none."""


def format_of_template(template: str) -> str:
    """Return the name of the format of the reasoning that a chat template writes; empty if it writes none."""
    if HARMONY_REASONS in template:
        return "openai_gptoss"
    for start, name in _SIGNS.items():
        if start in template:
            return name
    return "qwen3" if THINK_END in template or THINK_START in template else ""


def reasoning_format(parser: str, of_template: str, plugins: Sequence[str] = ()) -> ReasoningFormat | None:
    """Return the format that ``parser`` names; ``auto`` is the one of the chat template. None: no reasoning is known.

    An unknown name, as of a newer tokenizer, counts as none. Raises ``ValueError`` for a plugin, of the packages
    ``plugins``, that is no format.
    """
    if ":" in parser:
        return _plugged(parser, load("reasoning_formats", parser, plugins))
    return FORMATS.get(of_template if parser == "auto" else parser)


def _plugged(named: str, value: Any) -> ReasoningFormat:
    form = dict(value) if isinstance(value, Mapping) else value
    try:
        found = ReasoningFormat(**form) if isinstance(form, dict) else form
        is_one = isinstance(found, ReasoningFormat) and bool(found.start and found.end)
    except TypeError:
        is_one = False
    if not is_one or not all(isinstance(text, str) for text in (found.start, found.end, found.aside)):
        raise ValueError(
            f"the plugin {named} (reasoning_formats) is no format; give an object of the texts start and end, of "
            "begins_inside, true or false, and perhaps of the text aside"
        )
    return found


def marks_of(reasoning: ReasoningFormat, encode: Callable[[str], Sequence[int]]) -> ReasoningMarks:
    """Return the marks of a format. ``encode`` returns the tokens of a text, without special tokens around it."""
    start, end, aside = (
        tuple(encode(text)) if text else () for text in (reasoning.start, reasoning.end, reasoning.aside)
    )
    return ReasoningMarks(start, end, reasoning.begins_inside, aside)


class _Phase(Enum):
    BEFORE = auto()
    """All tokens of the output so far begin the start mark."""
    INSIDE = auto()
    AFTER = auto()


_PHASES: Mapping[int, _Phase] = {
    ReasoningStart.NONE: _Phase.BEFORE,
    ReasoningStart.OPEN: _Phase.INSIDE,
    ReasoningStart.CLOSED: _Phase.AFTER,
}


class Reasoning:
    """Follows the reasoning of one output: at most one, at its beginning.

    The marks are not counted as reasoning tokens, as in vLLM.
    """

    __slots__ = ("_is_aside", "_marks", "_num_aside", "_num_in_mark", "_num_inside", "_phase", "_tail")

    def __init__(
        self, marks: ReasoningMarks, prompt_token_ids: Sequence[int], start: int = ReasoningStart.BY_MARKS
    ) -> None:
        """``start``: how the prompt leaves the reasoning; a value of a newer version counts as ``BY_MARKS``."""
        self._marks = marks
        self._phase = _PHASES.get(start) or _first_phase(marks, prompt_token_ids)
        self._num_in_mark = 0  # tokens of the start mark that the output begins with
        self._num_inside = 0  # tokens after the start mark; the whole end mark included
        self._num_aside = 0  # of these, those of calls and texts within the reasoning
        self._is_aside = False
        self._tail: list[int] = []  # the last tokens, at most as many as the longest mark has

    def copy(self) -> "Reasoning":
        """Return an independent copy, for another output of the same prompt."""
        other = copy(self)
        other._tail = self._tail.copy()
        return other

    @property
    def is_inside(self) -> bool:
        """Whether the next token belongs to the reasoning or its end mark, or may be the model's own start mark."""
        return self._phase is _Phase.INSIDE or (self._phase is _Phase.BEFORE and self._marks.begins_inside)

    @property
    def is_over(self) -> bool:
        """Whether the next token belongs to the answer."""
        return self._phase is _Phase.AFTER

    @property
    def num_tokens(self) -> int:
        """The reasoning tokens so far."""
        end = len(self._marks.end) if self.is_over and self._num_inside else 0
        return self._num_inside - end - self._num_aside

    def lacks_answer(self, *, has_ended_by_itself: bool) -> bool:
        """Return whether an output whose constraint begins after its reasoning has ended before that: it is cut off."""
        # The model may end within its reasoning. The answer is empty then, and an empty one that has ended by itself
        # looks like one that obeys the constraint.
        return has_ended_by_itself and self.is_inside

    @property
    def next_of_start(self) -> int:
        """The token that begins or continues the start mark, while it is open whether the model will reason."""
        return self._marks.start[self._num_in_mark]

    @property
    def undecided_token_ids(self) -> list[int]:
        """The tokens of the output, while it is open whether they are a start mark or the answer."""
        return list(self._marks.start[: self._num_in_mark])

    @property
    def next_of_end(self) -> int:
        """The token that continues the end mark, after as much of it as the output ends with."""
        end, tail = self._marks.end, self._tail
        size = next(size for size in range(len(end) - 1, -1, -1) if tuple(tail[len(tail) - size :]) == end[:size])
        return end[size]

    def feed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Follow new tokens of the output. Returns those that belong to the answer."""
        for index, token_id in enumerate(token_ids):
            if self._phase is _Phase.AFTER:
                return token_ids[index:]
            if self._phase is _Phase.INSIDE:
                self._add(token_id)
            elif (answer := self._begin(token_id)) is not None:
                return [*answer, *token_ids[index:]]
        return ()

    def _begin(self, token_id: int) -> list[int] | None:
        """Follow a token of the start mark, or one that shows that the output begins without it. Returns the tokens
        before it if they belong to the answer."""
        start = self._marks.start
        if token_id == start[self._num_in_mark]:
            self._num_in_mark += 1
            self._push(token_id)
            if self._num_in_mark == len(start):
                self._phase = _Phase.INSIDE
                self._tail.clear()
            return None
        if not self._marks.begins_inside:
            self._phase = _Phase.AFTER
            return self.undecided_token_ids
        self._phase = _Phase.INSIDE
        self._tail.clear()
        for each in (*start[: self._num_in_mark], token_id):
            self._add(each)
        return None

    def _add(self, token_id: int) -> None:
        self._num_inside += 1
        self._push(token_id)
        if self._ends_with(self._marks.end):
            self._phase = _Phase.AFTER
            self._num_aside -= (len(self._marks.end) - 1) * self._is_aside  # which the end mark counts already
        elif self._marks.aside:
            self._step_aside()

    def _step_aside(self) -> None:
        """Follow a token of a format whose reasoning has calls and texts within it."""
        marks = self._marks
        if self._is_aside:
            self._num_aside += 1
            self._is_aside = not self._ends_with(marks.start)
        elif self._ends_with(marks.aside):
            self._num_aside += len(marks.aside)
            self._is_aside = True

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        return self._tail[-1] == mark[-1] and tuple(self._tail[-len(mark) :]) == mark

    def _push(self, token_id: int) -> None:
        self._tail.append(token_id)
        if len(self._tail) > max(len(self._marks.end), len(self._marks.aside) and len(self._marks.start)):
            del self._tail[0]


def _first_phase(marks: ReasoningMarks, prompt: Sequence[int]) -> _Phase:
    prompt = list(prompt)
    after_start, after_end = _after_last(prompt, marks.start), _after_last(prompt, marks.end)
    # The prompt decides, and nothing reports that a reasoning has begun: a request may be preempted, handed over or
    # repeated on another engine at any token.
    if after_start > after_end:
        return _Phase.INSIDE
    # A template removes earlier reasoning, or it may have kept that of an earlier turn, far from the end.
    is_closed = after_end and (marks.begins_inside or len(prompt) - after_end <= MAX_BLANK_TOKENS)
    return _Phase.AFTER if is_closed else _Phase.BEFORE


def _after_last(tokens: list[int], mark: tuple[int, ...]) -> int:
    """Return the position after the last occurrence of a mark; 0 if there is none. Searches at the speed of C."""
    backwards = tokens[::-1]
    position = -1
    while True:
        try:
            position = backwards.index(mark[-1], position + 1)
        except ValueError:
            return 0
        after = len(tokens) - position
        if after >= len(mark) and tuple(tokens[after - len(mark) : after]) == mark:
            return after
