"""Compares the prompt of a turn with the turn before it: where they differ, why, and what that cost."""

import re
from array import array
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenloom.request.packed_ids import pack
from tokenloom.v1 import inference_pb2, output_processor_pb2, tokenizer_pb2, types_pb2
from tokenloom.v1.inference_pb2 import MissCause

from ..records.generate_request import Chat
from .past_turns import TOKEN_BYTES, ChatDigest, GeneratedSpan, PastTurn, PastTurns, digest_of, num_common

Decode = Callable[[Sequence[int]], Awaitable[str]]
"""Returns the text of tokens, special ones included."""

_KEPT = frozenset(
    (
        inference_pb2.MISS_CAUSE_RETOKENISED,
        inference_pb2.MISS_CAUSE_ARGUMENTS_RESERIALISED,
        inference_pb2.MISS_CAUSE_BLANKS_CHANGED,
    )
)
"""Causes of which the answer says the same, so that the generated tokens may stand in its place."""
_MORE_TOKENS = 1024
"""By so many tokens, and twice, a fresh tokenization may be longer than what was generated."""
_MAX_SPANS = 1000
"""Limits the answers of one prompt whose tokens are replaced."""


MAX_SESSION_NAME = 256
"""Characters by which the names of sessions are compared."""


class TurnNames(NamedTuple):
    """Holds the client's names for a turn: of its answer, of the answer of the turn to compare it with, and of its
    session. Empty: it gives none."""

    answer: str = ""
    compared: str = ""
    session: str = ""


UNNAMED = TurnNames()


@dataclass(slots=True)
class OpenTurn:
    """Holds a turn from its prompt to the end of its answer.

    Attributes:
        chat: What the client sent.
        tokens: The prompt, 4 bytes a token.
        hashes, salt, adapter: As in :class:`.PastTurn`.
        block_size: Tokens of a KV block.
        opens_reasoning: Whether the prompt has opened the reasoning.
        before: The turn that it is compared with; None: none is remembered.
        common: Tokens with which both begin.
        potential: Tokens of the turn before that the prompt would have found if it had continued it.
        cause: Why they differ; 0 where the prompt continues the whole turn.
        spans: Generated tokens in the prompt, which have replaced those of a fresh tokenization.
        answer: The client's name for the answer; empty: it has the request's id.
        session: The client's name for the session; empty: it gives none.
        is_kept: Whether the client wants the prompt kept in the cache.
    """

    chat: ChatDigest
    tokens: bytes
    hashes: Sequence[int]
    salt: bytes
    adapter: bytes
    block_size: int
    opens_reasoning: bool
    before: PastTurn | None = None
    common: int = 0
    potential: int = 0
    cause: MissCause = inference_pb2.MISS_CAUSE_UNSPECIFIED
    spans: list[GeneratedSpan] = field(default_factory=list)
    answer: str = ""
    session: str = ""
    is_kept: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_reusable(self) -> int:
        """Tokens of the prompt that a cache has if it keeps all of the turn before: whole blocks, without the last
        token of that turn and of this one, which was not or must be computed."""
        if self.before is None:
            return 0
        most = min(self.common, self.before.num_tokens - 1, self.num_tokens - 1)
        return most // self.block_size * self.block_size

    def miss(self, finished: output_processor_pb2.RequestFinished) -> inference_pb2.CacheMiss | None:
        """Return why the prompt was not found in the cache as far as the turn before had left it there; None if it
        was. ``finished``: of its first output."""
        cached, reusable, timeline = finished.cached_tokens, self.num_reusable, finished.timeline
        # The coordinator knows the turns that came through other gateways too, though not their texts.
        past = min(timeline.past_tokens, self.num_tokens - 1) // self.block_size * self.block_size
        if cached < max(reusable, past):
            if past > reusable or self.before is None:
                is_elsewhere, reusable = timeline.kv_elsewhere, past
            else:
                is_elsewhere = engine_of(finished) != self.before.engine
            lost = inference_pb2.MISS_CAUSE_OTHER_ENGINE if is_elsewhere else inference_pb2.MISS_CAUSE_EVICTED
            return inference_pb2.CacheMiss(cause=lost, token=cached, missed_tokens=reusable - cached)
        return self.difference(cached)

    def difference(self, cached: int = 0) -> inference_pb2.CacheMiss | None:
        """Return why the prompt differs from the turn before; None if it continues it. ``cached``: tokens that were in
        the cache all the same."""
        if not self.cause:
            return None
        missed = max(self.potential - max(self.common, cached), 0)
        return inference_pb2.CacheMiss(cause=self.cause, token=self.common or cached, missed_tokens=missed)

    def num_written(self, cached: int) -> int:
        """Return how many tokens of the prompt the cache has got, in whole blocks. ``cached``: those that it had."""
        return max(self.num_tokens // self.block_size * self.block_size - cached, 0)

    def is_compared_with(self, answer: str) -> bool:
        """Return whether the turn before has this answer."""
        return self.before is not None and self.before.answer == answer

    @property
    def has_other_system(self) -> bool:
        """Whether the system prompt is not that of the turn before."""
        before = None if self.before is None else self.before.chat.messages[0]
        return before is not None and before.role in ("system", "developer") and before != self.chat.messages[0]

    def ended(
        self, answer: str, token_ids: "array[int]", finished: output_processor_pb2.RequestFinished, num_reasoning: int
    ) -> PastTurn:
        """Return the turn with its answer. ``answer``: the request's id; ``token_ids``: of the answer."""
        tokens = self.tokens + token_ids.tobytes()
        answered = GeneratedSpan(self.num_tokens, len(tokens) // TOKEN_BYTES)
        return PastTurn(
            answer=self.answer or answer,
            chat=self.chat,
            tokens=tokens,
            num_prompt=self.num_tokens,
            spans=(*self.spans, answered),
            hashes=array(
                "Q", self.hashes
            ),  # a view of the tokenizer's message would keep all of that, 15 bytes a token
            salt=self.salt,
            adapter=self.adapter,
            engine=finished.timeline.decode_engine or finished.timeline.prefill_engine,
            num_reasoning=num_reasoning,
            opens_reasoning=self.opens_reasoning,
            session=self.session,
        )

    @property
    def replaced(self) -> PastTurn | None:
        """The turn before, if this one continues its whole prompt, so that it need not be remembered any more."""
        before = self.before
        return before if before is not None and self.common >= before.num_prompt else None


def engine_of(finished: output_processor_pb2.RequestFinished) -> str:
    """Return the engine that computed the prompt."""
    return finished.timeline.prefill_engine or finished.timeline.decode_engine


class TurnComparer:
    """Compares the turns of one mesh with those that it remembers."""

    def __init__(self, past: PastTurns, *, replays_ids: bool = False) -> None:
        """``replays_ids``: put the tokens that the model generated in the place of those of a fresh tokenization, where
        the answer says the same."""
        self.past = past
        self._replays = replays_ids

    async def open(
        self,
        chat: Chat,
        prompt: tokenizer_pb2.TokenizedPrompt,
        tenant: str,
        salt: tuple[bytes, bytes],
        block_size: int,
        ends: Collection[int],
        decode: Decode,
        named: TurnNames = UNNAMED,
    ) -> OpenTurn:
        """Compare a prompt with the turn that it continues; with replayed ids, change the prompt, which then has no
        hashes. ``salt``: of its KV blocks, and the digest of its adapter. ``ends``: the tokens that end an answer."""
        packed = prompt.packed_token_ids
        tokens = packed or pack(prompt.token_ids)
        is_open = prompt.reasoning_start == types_pb2.REASONING_START_OPEN
        turn = OpenTurn(digest_of(chat), tokens, prompt.block_hash_prefixes, *salt, block_size, is_open)
        turn.answer, turn.session = named.answer, named.session
        before = self.past.of_answer(tenant, named.compared) if named.compared else None
        turn.before = before = before or self.past.find(tenant, tokens, turn.hashes)
        if before is None:
            turn.cause, turn.potential = inference_pb2.MISS_CAUSE_NEW_PREFIX, turn.num_tokens
        elif (before.salt, before.adapter) != salt:
            same_adapter = before.adapter == turn.adapter
            turn.cause = (
                inference_pb2.MISS_CAUSE_SALT_CHANGED if same_adapter else inference_pb2.MISS_CAUSE_ADAPTER_CHANGED
            )
            turn.potential = num_common(tokens, before.tokens)
        else:
            await self._compare(turn, before, ends, decode, is_named=turn.is_compared_with(named.compared))
        if turn.tokens != tokens:
            del prompt.token_ids[:], prompt.block_hash_prefixes[:]
            if packed:
                prompt.packed_token_ids = turn.tokens
            else:
                prompt.token_ids.extend(array("I", turn.tokens))
        return turn

    async def _compare(
        self, turn: OpenTurn, before: PastTurn, ends: Collection[int], decode: Decode, *, is_named: bool
    ) -> None:
        """Find where the prompt differs from the turn before, and why; replace answers that say the same.
        ``is_named``: the client names the turn before."""
        while True:
            common = turn.common = num_common(turn.tokens, before.tokens)
            turn.cause = inference_pb2.MISS_CAUSE_UNSPECIFIED
            turn.potential = min(before.num_tokens, turn.num_tokens)
            if common == turn.potential:
                break
            span = next((span for span in before.spans if span.start <= common < span.end), None)
            if span is None:
                turn.cause = cause_within_prompt(before, turn.chat)
                is_changed = turn.cause == inference_pb2.MISS_CAUSE_MESSAGE_CHANGED
                if is_changed and not is_named and _is_another(before, turn):
                    turn.cause, turn.potential = inference_pb2.MISS_CAUSE_NEW_PREFIX, turn.num_tokens
                break
            piece = _piece(turn.tokens, before.tokens, span, ends)
            if not (is_same := bool(span.fresh) and piece.now == span.fresh):
                turn.cause, is_same = await _cause_within_answer(before, span, piece, decode)
            if not (self._replays and is_same and piece.has_end and len(turn.spans) < _MAX_SPANS):
                break
            rest = turn.tokens[span.start * TOKEN_BYTES + len(piece.now) :]
            turn.tokens = before.tokens[: span.end * TOKEN_BYTES] + rest
            turn.spans.append(GeneratedSpan(span.start, span.end, piece.now))
        kept = [span for span in before.spans if span.fresh and span.end <= turn.common and span not in turn.spans]
        turn.spans = sorted({span.start: span for span in (*kept, *turn.spans)}.values(), key=lambda span: span.start)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Holds an answer as the prompt has it now.

    Attributes:
        now: Its tokens up to where the generated ones would end, 4 bytes each.
        texts: The tokens of the answer then and now, without what ends it.
        has_end: Whether its end was found in the prompt.
    """

    now: bytes
    texts: tuple[Sequence[int], Sequence[int]]
    has_end: bool


def _piece(tokens: bytes, before: bytes, span: GeneratedSpan, ends: Collection[int]) -> _Piece:
    then = array("I", before[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES])
    now = array("I", tokens[span.start * TOKEN_BYTES :])
    end = next((index for index, token in enumerate(now) if token in ends), None)
    if end is None:
        return _Piece(b"", (then, now[: 2 * len(then)]), has_end=False)
    is_ended = then[-1] in ends
    # An answer that is much longer now says something else; its text would be compared on the event loop.
    texts = then[:-1] if is_ended else then, now[: min(end, 2 * len(then) + _MORE_TOKENS)]
    return _Piece(now[: end + is_ended].tobytes(), texts, has_end=True)


async def _cause_within_answer(
    before: PastTurn, span: GeneratedSpan, piece: _Piece, decode: Decode
) -> tuple[MissCause, bool]:
    """Return why an answer is not what was generated, and whether it says the same."""
    then, now = [await decode(ids) for ids in piece.texts]
    reasons = span.end * TOKEN_BYTES == len(before.tokens) and before.num_reasoning > 0
    cause = cause_between(then, now, reasons=reasons)
    return cause, cause in _KEPT and _plain(then) == _plain(now)


def cause_between(then: str, now: str, *, reasons: bool) -> MissCause:
    """Return why the text of an answer is another one. ``reasons``: the answer began with reasoning."""
    if then == now:
        return inference_pb2.MISS_CAUSE_RETOKENISED
    place = next((at for at, (one, other) in enumerate(zip(then, now, strict=False)) if one != other), len(then))
    is_in_call = 0 <= then.find("{") < place
    if _BLANKS.sub("", then) == _BLANKS.sub("", now) and not is_in_call:
        return inference_pb2.MISS_CAUSE_BLANKS_CHANGED
    if is_in_call and _has_equal_letters(_plain(then), _plain(now)):
        return inference_pb2.MISS_CAUSE_ARGUMENTS_RESERIALISED
    if reasons and len(now) - _num_common_at_end(then, now) <= _EMPTY_THOUGHT < len(then) - len(now) + _EMPTY_THOUGHT:
        return inference_pb2.MISS_CAUSE_REASONING_DROPPED
    return inference_pb2.MISS_CAUSE_MESSAGE_CHANGED


def cause_within_prompt(before: PastTurn, chat: ChatDigest) -> MissCause:
    """Return why a prompt differs from an earlier one before the answer of that one."""
    then, now = before.chat.messages, chat.messages
    if before.chat.tools != chat.tools:
        return inference_pb2.MISS_CAUSE_TOOLS_CHANGED
    for one, other in zip(then, now, strict=False):
        if one == other:
            continue
        if one.content == other.content:
            return inference_pb2.MISS_CAUSE_REASONING_DROPPED
        is_steady = bool(one.steady) and one.steady == other.steady
        return inference_pb2.MISS_CAUSE_VOLATILE_LINE if is_steady else inference_pb2.MISS_CAUSE_MESSAGE_CHANGED
    if len(now) < len(then) or (len(now) > len(then) and now[len(then)].role != "assistant"):
        return inference_pb2.MISS_CAUSE_MESSAGE_CHANGED
    has_reasoned = before.num_reasoning or before.opens_reasoning or any(message.reasoning for message in then)
    if before.chat.variables == chat.variables and has_reasoned:
        return inference_pb2.MISS_CAUSE_REASONING_DROPPED
    return inference_pb2.MISS_CAUSE_TEMPLATE_CHANGED


def _is_another(before: PastTurn, turn: OpenTurn) -> bool:
    """Return whether a prompt has no answer yet, and of an earlier one nothing but the system prompt: it begins another
    conversation. In a session that the client names it compacts or branches that one."""
    if (turn.session and turn.session == before.session) or any(m.role == "assistant" for m in turn.chat.messages):
        return False
    then, now = [
        {message.content for message in chat.messages if message.role not in ("system", "developer")}
        for chat in (before.chat, turn.chat)
    ]
    return then.isdisjoint(now)


_BLANKS = re.compile(r"\s+")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\/")
_EMPTY_THOUGHT = 40
"""Characters of the marks that a template may write around reasoning that it leaves out."""


def _plain(text: str) -> str:
    """Return a text without blanks, and without the escapes that JSON leaves to the writer."""
    text = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else "/", text)
    return _BLANKS.sub("", text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _has_equal_letters(one: str, other: str) -> bool:
    return len(one) == len(other) and sorted(one) == sorted(other)


def _num_common_at_end(one: str, other: str) -> int:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
