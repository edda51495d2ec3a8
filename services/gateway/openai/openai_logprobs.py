"""Log probabilities in OpenAI's shapes: chats token by token, completions in columns; and prompts as vLLM has them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenloom.v1 import output_processor_pb2

LOWEST = -9999.0
"""What minus infinity is told as, which JSON cannot: as in vLLM."""


@dataclass(frozen=True, slots=True)
class Token:
    """One that was taken, or might have been."""

    token_id: int
    data: bytes
    logprob: float
    rank: int | None = None
    """1 is best; None: not known, of one told whatever its rank."""

    def text(self, *, as_id: bool) -> str:
        return f"token_id:{self.token_id}" if as_id else self.data.decode(errors="replace")


Position = tuple[Token, Sequence[Token]]
"""The token that was taken, and the alternatives that are told."""


def positions(
    told: Iterable[output_processor_pb2.SlotTextLogprobs], token_ids: Sequence[int], first: int, num_best: int
) -> Iterator[Position]:
    """What is told of tokens in order; ``token_ids`` holds them all, from position ``first`` on.

    Of the alternatives the first ``num_best`` are ranked.
    """
    for part in told:
        columns, top = part.logprobs, part.logprobs.top
        ranks = [rank + 1 if rank < num_best else None for rank in range(top)]
        for i, (data, logprob, rank) in enumerate(zip(part.sampled_text, columns.sampled, columns.rank, strict=True)):
            rows = slice(i * top, (i + 1) * top)
            others = zip(columns.token_id[rows], part.token_text[rows], columns.logprob[rows], ranks, strict=True)
            taken = Token(token_ids[part.token_index - first + i], data, max(logprob, LOWEST), rank)
            yield taken, [Token(id_, text, max(value, LOWEST), rank) for id_, text, value, rank in others]


def chat_content(at: Iterable[Position], *, as_ids: bool) -> list[dict[str, object]]:
    """The entries of a chat's ``logprobs.content``."""
    return [_entry(taken, as_ids) | {"top_logprobs": [_entry(each, as_ids) for each in top]} for taken, top in at]


def _entry(token: Token, as_ids: bool) -> dict[str, object]:
    return {"token": token.text(as_id=as_ids), "logprob": token.logprob, "bytes": list(token.data)}


class CompletionLogprobs:
    """The columns of one choice of a completion; ``take`` them as often as there is an event to send."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0
        self._clear()

    def add_first(self, token_id: int, data: bytes) -> None:
        """The prompt's first token, which has no probability."""
        self._append(Token(token_id, data, 0.0), None, None)

    def add(self, at: Iterable[Position]) -> None:
        for taken, top in at:
            best: dict[str, float] = {}
            for each in (*top, taken):  # tokens of one text: the likeliest of them
                text = each.text(as_id=self._as_ids)
                best[text] = max(each.logprob, best.get(text, LOWEST))
            self._append(taken, taken.logprob, best)

    def take(self) -> dict[str, object]:
        """What was added since the last time."""
        columns: dict[str, object] = {
            "text_offset": self._offsets,
            "token_logprobs": self._logprobs,
            "tokens": self._tokens,
            "top_logprobs": self._top,
        }
        self._clear()
        return columns

    def _append(self, token: Token, logprob: float | None, top: dict[str, float] | None) -> None:
        text = token.text(as_id=self._as_ids)
        self._offsets.append(self._offset)
        self._tokens.append(text)
        self._logprobs.append(logprob)
        self._top.append(top)
        self._offset += len(text)

    def _clear(self) -> None:
        self._offsets: list[int] = []
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []


def prompt_object(at: Iterable[Position]) -> list[dict[str, object] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt but the first, token ids and what is told of them."""
    told: list[dict[str, object] | None] = [None]
    for taken, top in at:
        told.append(
            {
                str(each.token_id): {
                    "logprob": each.logprob,
                    "rank": each.rank,
                    "decoded_token": each.text(as_id=False),
                }
                for each in (*top, taken)
            }
        )
    return told
