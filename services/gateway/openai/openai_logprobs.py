"""Log probabilities in OpenAI's forms, by token for chats and in columns for completions, and in vLLM's for prompts.

An answer may hold millions of them. So they are written as JSON position by position, by iterators that the caller may
pause, and what is written of a token is kept for the next time.
"""

from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from tokenloom.v1 import output_processor_pb2

from ..encoding.sse import JsonBlocks, encode_json

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; as in vLLM."""
_KNOWN_TOKENS = 1 << 14
"""Tokens whose JSON is kept, about 4 MB."""


class TokenPosition(NamedTuple):
    """A token that was sampled, and the alternatives to return, in columns."""

    token_id: int
    data: bytes
    logprob: float
    rank: int | None
    """1 is the likeliest; None: unknown, for a token that the client named."""
    ids: Sequence[int]
    texts: Sequence[bytes]
    logprobs: Sequence[float]
    ranks: Sequence[int | None]


# An answer of 25,600 tokens with 20 alternatives, 47 MB, took 2.7 s of the event loop, in which other streams timed
# out. Position by position it takes 0.67 s, and 11 ms at most in a turn.
def positions(
    parts: Iterable[output_processor_pb2.SlotTextLogprobs], token_ids: Sequence[int], first: int, num_best: int
) -> Iterator[TokenPosition]:
    """Return the log probabilities of tokens in order; ``token_ids`` holds the tokens, from position ``first`` on.

    The first ``num_best`` alternatives are ranked.
    """
    for part in parts:
        columns, top = part.logprobs, part.logprobs.top
        ranks = [rank + 1 if rank < num_best else None for rank in range(top)]
        at = part.token_index - first
        for i, (data, logprob, rank) in enumerate(zip(part.sampled_text, columns.sampled, columns.rank, strict=True)):
            rows = slice(i * top, (i + 1) * top)
            values = columns.logprob[rows]
            if values and min(values) < LOWEST:
                values = [max(value, LOWEST) for value in values]
            texts = part.token_text[rows]
            yield TokenPosition(
                token_ids[at + i], data, max(logprob, LOWEST), rank, columns.token_id[rows], texts, values, ranks
            )


def chat_entry(at: TokenPosition, *, as_ids: bool) -> bytes:
    """Return the JSON of one entry of a chat's ``logprobs.content``."""
    own, *numbers = encode_json([at.logprob, *at.logprobs])[1:-1].split(b",")
    head, tail = _ends(at.data, at.token_id if as_ids else None)
    others = map(_ends, at.texts, at.ids if as_ids else repeat(None))
    top = b"},".join([begin + number + end for (begin, end), number in zip(others, numbers, strict=True)])
    return b'%b%b%b,"top_logprobs":[%b%b' % (head, own, tail, top, b"}]}" if top else b"]}")


@lru_cache(_KNOWN_TOKENS)
def _ends(data: bytes, token_id: int | None) -> tuple[bytes, bytes]:
    """Return what stands before and after a token's log probability; without the closing brace."""
    head = encode_json({"token": _text(data, token_id)})[:-1] + b',"logprob":'
    return head, b',"bytes":' + encode_json(list(data))


@lru_cache(_KNOWN_TOKENS)
def _text(data: bytes, token_id: int | None) -> str:
    """Return a token's text; its id, if one is given."""
    return data.decode(errors="replace") if token_id is None else f"token_id:{token_id}"


class CompletionLogprobs:
    """Collects the log probabilities of one choice of a completion, in columns.

    Attributes:
        has_begun: Whether anything was ever added.
        offset: Characters up to the end of what was added.
    """

    def __init__(self, *, as_ids: bool, offset: int = 0) -> None:
        """``offset``: characters before the first token."""
        self.has_begun = False
        self._as_ids = as_ids
        self.offset = offset
        # In the text, a character whose bytes are divided among tokens stands once.
        self._decode = getincrementaldecoder("utf-8")("replace").decode
        self._offsets: list[int] = []
        self._logprobs: list[float | None] = []
        self._tokens: list[str] = []
        self._top = JsonBlocks()

    def __bool__(self) -> bool:
        """Whether anything was added since the last call of :meth:`take`."""
        return bool(self._offsets)

    def add_first(self, token_id: int, data: bytes) -> None:
        """Add the prompt's first token, which has no probability."""
        self._append(_text(data, token_id if self._as_ids else None), data, None, b"null")

    def add(self, at: TokenPosition) -> None:
        best: dict[str, float] = {}
        ids: Iterable[int | None] = at.ids if self._as_ids else repeat(None)
        for text, logprob in zip(map(_text, at.texts, ids), at.logprobs, strict=True):
            if logprob > best.get(text, LOWEST - 1):  # of tokens with the same text, keep the likeliest
                best[text] = logprob
        own = _text(at.data, at.token_id if self._as_ids else None)
        best[own] = max(at.logprob, best.get(own, LOWEST))
        self._append(own, at.data, at.logprob, encode_json(best))

    def take(self) -> Iterator[bytes]:
        """Return the JSON of what was added since the last call, in blocks."""
        columns = {"text_offset": self._offsets, "token_logprobs": self._logprobs, "tokens": self._tokens}
        self._offsets, self._logprobs, self._tokens = [], [], []
        yield encode_json(columns)[:-1] + b',"top_logprobs":['
        yield from self._top.take()
        yield b"]}"

    def _append(self, text: str, data: bytes, logprob: float | None, top: bytes) -> None:
        self.has_begun = True
        self._offsets.append(self.offset)
        self._logprobs.append(logprob)
        self._tokens.append(text)
        self._top.add(top)
        self.offset += len(self._decode(data))


def prompt_entries(at: Iterable[TokenPosition]) -> Iterator[bytes]:
    """Return the entries of vLLM's ``prompt_logprobs``: null for the first token of the prompt, then an object each."""
    yield b"null"
    for position in at:
        entry: dict[str, object] = {}
        columns = zip(position.ids, position.texts, position.logprobs, position.ranks, strict=True)
        for token_id, data, logprob, rank in columns:
            entry[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": _text(data, None)}
        own = {"logprob": position.logprob, "rank": position.rank, "decoded_token": _text(position.data, None)}
        entry[str(position.token_id)] = own
        yield encode_json(entry)
