"""Everything that changes logits before a token is drawn: the interface, and the kinds of logits processors, each of
which applies one or a few sampling parameters to the rows that ask for them. It costs nothing while no request asks."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams, TimestampRules, TranscriptRules


class SeenTokens:
    """Holds the distinct tokens of one request with their counts in the output, in growing columns.

    It is sparse, because a request sees hundreds of tokens of a vocabulary of a hundred thousand.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self._slot_of = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = np.fromiter(self._slot_of, dtype=np.int64, count=len(self._slot_of))
        self._counts = np.zeros(len(self._slot_of), dtype=np.int32)
        self.num_outputs = 0
        """Output tokens that were counted."""
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._token_ids):
            room = max(64, slot)
            self._token_ids = np.concatenate([self._token_ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
        self._token_ids[slot] = token_id
        self._counts[slot] += 1
        self.num_outputs += 1

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the distinct tokens of prompt and output [n], and how often each is in the output [n]."""
        return self._token_ids[: len(self._slot_of)], self._counts[: len(self._slot_of)]

    def penalize(self, logits: npt.NDArray[np.float32], params: CoreSamplingParams) -> None:
        """Change one row of logits, [vocab], in place.

        Repetition looks at prompt and output, presence and frequency at the output, in this order (as in vLLM).
        """
        token_ids, counts = self.columns()
        seen = logits[token_ids].astype(np.float64)
        with np.errstate(over="ignore"):
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            seen -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            logits[token_ids] = seen


Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]


@dataclass(slots=True)
class RowEdit:
    """Holds the changes of one row. :class:`LogitsProcessor` s fill it in their order."""

    masked: list[Ints] = field(default_factory=list)
    """Tokens that may not be drawn."""
    allowed: list[Words] = field(default_factory=list)
    """Bitmasks: bit i of word w is set if token 32 * w + i may be drawn. Tokens beyond the last word may not."""
    bias: tuple[Ints, npt.NDArray[np.float32]] | None = None
    """Tokens, each once, and what is added to their logits."""
    penalties: tuple[SeenTokens, CoreSamplingParams] | None = None
    forced: int = -1
    """The only token that may be drawn, whatever the others say; -1: none."""
    on_host: bool = False
    """Whether only :meth:`LogitsProcessor.apply` knows what becomes of the logits."""
    is_plugged: bool = False
    """Whether plugins change the logits where they lie: before penalties, and after what lists and masks say."""

    def split(self) -> tuple["RowEdit", "RowEdit"]:
        """Return what comes before the plugins, and what comes after them."""
        return RowEdit(self.masked, self.allowed, self.bias), RowEdit(penalties=self.penalties, forced=self.forced)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is changed, but perhaps by plugins."""
        lists = self.masked or self.allowed or self.bias is not None
        return not lists and self.penalties is None and self.forced < 0

    def listed(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Return tokens, each once, and what is added to their logits; -inf masks one."""
        biased, values = self.bias if self.bias is not None else (np.empty(0, np.int64), np.empty(0, np.float32))
        if not self.masked:
            return biased, values
        masked = np.unique(np.concatenate(self.masked))
        kept = ~np.isin(biased, masked)
        minus = np.full(len(masked), -np.inf, dtype=np.float32)
        return np.concatenate([biased[kept], masked]), np.concatenate([values[kept], minus])


def pack_bits(token_ids: Ints) -> Words:
    """Return the shortest bitmask that allows these tokens, [n], and no others."""
    bits = np.zeros((int(token_ids.max(initial=-1)) // 32 + 1) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


_DEFAULTS = CoreSamplingParams(max_tokens=1, seed=0)


class LogitsProcessor(Protocol):
    """Applies one kind of change. It keeps state only for the batch rows whose requests ask for it."""

    parameters: tuple[str, ...]
    """A request asks for it by giving one of these sampling parameters a value other than the default."""

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """Add a request that asks for it, also when it comes back from a preemption with the output it had."""

    def remove(self, row: int) -> None:
        """Remove a request."""

    def append(self, row: int, token_id: int) -> None:
        """Record an output token of a request."""

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        """Change logits [n, vocab] in place: the rows ``index_of[row]`` of its own batch rows."""

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        """Add to ``edit`` what :meth:`apply` would do to the logits of the token ``output_index`` of this row."""

    def follows_output(self, row: int) -> bool:
        """Return whether :meth:`describe` depends on the tokens of the output, and not on their number alone; tokens
        that a device counts by itself do not count."""


class LogitsProcessors:
    """Applies all kinds in order. A step in which no row asks for any costs one dict lookup."""

    def __init__(self, in_order: Sequence[LogitsProcessor]) -> None:
        self._in_order = tuple(in_order)
        readers = [attrgetter(*each.parameters) for each in self._in_order]
        self._wanted_by = [(each, read, read(_DEFAULTS)) for each, read in zip(self._in_order, readers, strict=True)]
        self._of_row: dict[int, list[LogitsProcessor]] = {}

    def __bool__(self) -> bool:
        """Return whether any row asks for one."""
        return bool(self._of_row)

    def __contains__(self, row: int) -> bool:
        """Return whether this row asks for one."""
        return row in self._of_row

    def add(self, row: int, params: CoreSamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Add a request with these tokens; the first are its prompt. Returns whether it asks for a processor."""
        wanted: list[LogitsProcessor] = []
        for each, read, default in self._wanted_by:
            if read(params) != default:
                wanted.append(each)
        if wanted:
            self._of_row[row] = wanted
            for processor in wanted:
                processor.add(row, params, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])
        return bool(wanted)

    def remove(self, row: int) -> None:
        """Remove a request."""
        for processor in self._of_row.pop(row, ()):
            processor.remove(row)

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """Record one output token for each of these rows, [n]."""
        if not self._of_row:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            for processor in self._of_row.get(row, ()):
                processor.append(row, token_id)

    def follow_output(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return whether what any of these rows [n] asks for depends on the tokens of its output, as the host has to
        know them."""
        if not self._of_row:
            return False
        of_rows = ((row, processor) for row in rows.tolist() for processor in self._of_row.get(row, ()))
        return any(processor.follows_output(row) for row, processor in of_rows)

    def apply(self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> None:
        """Change logits [n, vocab] of these batch rows, [n], in place."""
        if not self._of_row:
            return
        index_of = {row: index for index, row in enumerate(rows.tolist()) if row in self._of_row}
        if index_of:
            for processor in self._in_order:
                processor.apply(logits, index_of)

    def describe(self, row: int, output_index: int) -> RowEdit:
        """Return what :meth:`apply` would do to a row's logits of the token ``output_index`` of its output."""
        edit = RowEdit()
        for processor in self._of_row.get(row, ()):
            processor.describe(row, output_index, edit)
        return edit


State = TypeVar("State")
LogitsRow = npt.NDArray[np.float32]
"""[vocab]: a view of the logits of one row."""


class RowProcessor(Generic[State]):
    """Fulfils most of :class:`LogitsProcessor` for a kind that changes each row by itself, from a state of the row."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def remove(self, row: int) -> None:
        del self._states[row]

    def append(self, row: int, token_id: int) -> None:
        pass

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, state in self._states.items():
            if (index := index_of.get(row)) is not None:
                self._change(logits[index], state)

    def follows_output(self, row: int) -> bool:
        return False

    def _change(self, logits: LogitsRow, state: State) -> None:
        """Change the logits of one row in place."""
        raise NotImplementedError


class AllowedTokens(RowProcessor[npt.NDArray[np.int64]]):
    """Leaves the tokens of a list, and no others."""

    parameters: tuple[str, ...] = ("allowed_token_ids",)

    def __init__(self) -> None:
        super().__init__()
        self._bitmasks: dict[int, Words] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._states[row] = np.array(params.allowed_token_ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        super().remove(row)
        self._bitmasks.pop(row, None)

    def _change(self, logits: LogitsRow, state: npt.NDArray[np.int64]) -> None:
        allowed = logits[state]
        logits[:] = -np.inf
        logits[state] = allowed

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if row not in self._bitmasks:
            self._bitmasks[row] = pack_bits(self._states[row])
        edit.allowed.append(self._bitmasks[row])


class _Words:
    """Indexes one request's words by the token before the last, so that a step looks only at words that may end now."""

    def __init__(self, words: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append((list(word[:-1]), word[-1]))
        self.longest_prefix = max((len(word) - 1 for word in words), default=0)
        """Of the words without their last tokens; 0: no word has more than one token."""
        self._tail = list(output_token_ids[-self.longest_prefix :]) if self.longest_prefix else []

    def append(self, token_id: int) -> None:
        if self.longest_prefix:
            self._tail.append(token_id)
            del self._tail[: -self.longest_prefix]

    def masked(self) -> list[int]:
        """Return the tokens that would complete a word."""
        if not self._tail:
            return self._always
        begun = self._after.get(self._tail[-1], ())
        return self._always + [last for prefix, last in begun if self._tail[-len(prefix) :] == prefix]


class BadWords(RowProcessor[_Words]):
    """Masks the tokens that would complete words of a list."""

    parameters: tuple[str, ...] = ("bad_words",)

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._states[row] = _Words(params.bad_words, output_token_ids)

    def append(self, row: int, token_id: int) -> None:
        self._states[row].append(token_id)

    def _change(self, logits: LogitsRow, state: _Words) -> None:
        logits[state.masked()] = -np.inf

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.masked.append(np.array(self._states[row].masked(), dtype=np.int64))

    def follows_output(self, row: int) -> bool:
        return self._states[row].longest_prefix > 0


@dataclass(slots=True)
class _Minimum:
    stop_token_ids: npt.NDArray[np.int64]
    min_tokens: int
    num_missing: int


class MinTokens(RowProcessor[_Minimum]):
    """Masks the tokens that end a request until its output has a number of tokens."""

    parameters: tuple[str, ...] = ("min_tokens",)

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        stop_token_ids = np.array(params.stop_token_ids or (), dtype=np.int64)
        self._states[row] = _Minimum(stop_token_ids, params.min_tokens, params.min_tokens - len(output_token_ids))

    def append(self, row: int, token_id: int) -> None:
        self._states[row].num_missing -= 1

    def _change(self, logits: LogitsRow, state: _Minimum) -> None:
        if state.num_missing > 0:
            logits[state.stop_token_ids] = -np.inf

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if output_index < self._states[row].min_tokens:
            edit.masked.append(self._states[row].stop_token_ids)


class LogitBias(RowProcessor[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]):
    """Adds numbers to the logits of single tokens."""

    parameters: tuple[str, ...] = ("logit_bias",)

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        bias = params.logit_bias or {}
        token_ids = np.fromiter(bias.keys(), dtype=np.int64, count=len(bias))
        self._states[row] = token_ids, np.fromiter(bias.values(), dtype=np.float32, count=len(bias))

    def _change(self, logits: LogitsRow, state: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]) -> None:
        token_ids, biases = state
        logits[token_ids] += biases

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.bias = self._states[row]


class Penalties(RowProcessor[tuple[SeenTokens, CoreSamplingParams]]):
    """Lowers the logits of tokens that prompt or output contain."""

    parameters: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._states[row] = SeenTokens(prompt_token_ids, output_token_ids), params

    def append(self, row: int, token_id: int) -> None:
        self._states[row][0].append(token_id)

    def _change(self, logits: LogitsRow, state: tuple[SeenTokens, CoreSamplingParams]) -> None:
        seen, params = state
        seen.penalize(logits, params)

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.penalties = self._states[row]


class _Written:
    """Holds what the rules of a transcript look at: its number of tokens, the last two, and the last moment of time."""

    def __init__(self, rules: TranscriptRules, output_token_ids: Sequence[int]) -> None:
        self.rules = rules
        self.suppressed = np.array(rules.suppressed_token_ids, dtype=np.int64)
        self.num_tokens = 0
        self.last_moment: int | None = None
        self._last_two: tuple[int, int] = (-1, -1)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self._last_two = self._last_two[1], token_id
        self.num_tokens += 1
        if self.rules.timestamps is not None and token_id >= self.rules.timestamps.first_token_id:
            self.last_moment = token_id

    def ends_with(self, first_moment: int) -> tuple[bool, bool]:
        """Return whether the last token is a moment, and whether the one before it is, or is missing."""
        return self._last_two[1] >= first_moment, self.num_tokens < 2 or self._last_two[0] >= first_moment


class Transcripts(RowProcessor[_Written]):
    """Leaves the tokens that may stand in a transcript (the rules of OpenAI's Whisper)."""

    parameters: tuple[str, ...] = ("transcript",)

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        assert params.transcript is not None
        self._states[row] = _Written(params.transcript, output_token_ids)

    def append(self, row: int, token_id: int) -> None:
        self._states[row].append(token_id)

    def follows_output(self, row: int) -> bool:
        return True

    def _change(self, logits: LogitsRow, state: _Written) -> None:
        if not state.num_tokens:
            logits[list(state.rules.begin_suppressed_token_ids)] = -np.inf
        logits[state.suppressed] = -np.inf
        if state.rules.timestamps is not None:
            _time(logits, state, state.rules.timestamps)

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        raise NotImplementedError("what a transcript may have next depends on the logits: only the host knows")


def _time(logits: LogitsRow, state: _Written, rules: TimestampRules) -> None:
    """Mask what may not follow in a transcript with moments of time."""
    first = rules.first_token_id
    logits[rules.no_timestamps_token_id] = -np.inf
    is_moment, follows_moment = state.ends_with(first)
    if is_moment and follows_moment:
        logits[first:] = -np.inf  # text follows the beginning of a segment
    elif is_moment:
        logits[: rules.num_text_ids] = -np.inf  # the next segment, or the end, follows the end of one
    if state.last_moment is not None:
        # A segment may begin when the one before it ends, but no segment is empty.
        logits[first : state.last_moment + (not is_moment or follows_moment)] = -np.inf
    if not state.num_tokens:
        logits[:first] = -np.inf
        if rules.max_initial_index is not None:
            logits[first + rules.max_initial_index + 1 :] = -np.inf
    moments = logits[first:].astype(np.float64)
    largest = moments.max(initial=-np.inf)
    if largest > -np.inf and largest + np.log(np.exp(moments - largest).sum()) > logits[:first].max(initial=-np.inf):
        logits[:first] = -np.inf


def make_logits_processors(plugged: Sequence[LogitsProcessor] = ()) -> LogitsProcessors:
    """Return all kinds of processors, in vLLM V1's order; the rules of transcripts compare what the others left."""
    first = (AllowedTokens(), BadWords(), MinTokens(), LogitBias())
    return LogitsProcessors([*first, *plugged, Penalties(), Transcripts()])
