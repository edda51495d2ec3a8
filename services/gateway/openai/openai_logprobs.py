"""Log probabilities in OpenAI's forms, by token for chats and in columns for completions, and in vLLM's for prompts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenloom.v1 import output_processor_pb2

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; as in vLLM."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was sampled, or an alternative to it."""

    token_id: int
    data: bytes
    logprob: float
    rank: int | None = None
    """1 is the likeliest; None: unknown, for a token that the client named."""

    def text(self, *, as_id: bool) -> str:
        return f"token_id:{self.token_id}" if as_id else self.data.decode(errors="replace")


Position = tuple[Token, Sequence[Token]]
"""The token that was sampled, and the alternatives to return."""


def positions(
    parts: Iterable[output_processor_pb2.SlotTextLogprobs], token_ids: Sequence[int], first: int, num_best: int
) -> Iterator[Position]:
    """Return the log probabilities of tokens in order; ``token_ids`` holds the tokens, from position ``first`` on.

    The first ``num_best`` alternatives are ranked.
    """
    for part in parts:
        columns, top = part.logprobs, part.logprobs.top
        ranks = [rank + 1 if rank < num_best else None for rank in range(top)]
        for i, (data, logprob, rank) in enumerate(zip(part.sampled_text, columns.sampled, columns.rank, strict=True)):
            rows = slice(i * top, (i + 1) * top)
            others = zip(columns.token_id[rows], part.token_text[rows], columns.logprob[rows], ranks, strict=True)
            taken = Token(token_ids[part.token_index - first + i], data, max(logprob, LOWEST), rank)
            yield taken, [Token(id_, text, max(value, LOWEST), rank) for id_, text, value, rank in others]


def chat_content(at: Iterable[Position], *, as_ids: bool) -> list[dict[str, object]]:
    """Return the entries of a chat's ``logprobs.content``."""
    return [_entry(taken, as_ids) | {"top_logprobs": [_entry(each, as_ids) for each in top]} for taken, top in at]


def _entry(token: Token, as_ids: bool) -> dict[str, object]:
    return {"token": token.text(as_id=as_ids), "logprob": token.logprob, "bytes": list(token.data)}


class CompletionLogprobs:
    """Collects the log probabilities of one choice of a completion, in columns."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0
        self._rows: list[tuple[int, float | None, str, dict[str, float] | None]] = []

    def add_first(self, token_id: int, data: bytes) -> None:
        """Add the prompt's first token, which has no probability."""
        self._append(Token(token_id, data, 0.0), None, None)

    def add(self, at: Iterable[Position]) -> None:
        for taken, top in at:
            best: dict[str, float] = {}
            for each in (*top, taken):  # of tokens with the same text, keep the likeliest
                text = each.text(as_id=self._as_ids)
                best[text] = max(each.logprob, best.get(text, LOWEST))
            self._append(taken, taken.logprob, best)

    def take(self) -> dict[str, object]:
        """Return what was added since the last call."""
        rows, self._rows = self._rows, []
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        return {name: [row[column] for row in rows] for column, name in enumerate(names)}

    def _append(self, token: Token, logprob: float | None, top: dict[str, float] | None) -> None:
        text = token.text(as_id=self._as_ids)
        self._rows.append((self._offset, logprob, text, top))
        self._offset += len(text)


def prompt_object(at: Iterable[Position]) -> list[dict[str, object] | None]:
    """Return vLLM's ``prompt_logprobs``: None for the first token of the prompt, then an object for each token."""
    objects: list[dict[str, object] | None] = [None]
    for taken, top in at:
        objects.append(
            {
                str(each.token_id): {
                    "logprob": each.logprob,
                    "rank": each.rank,
                    "decoded_token": each.text(as_id=False),
                }
                for each in (*top, taken)
            }
        )
    return objects
