"""Separates output that the client of a resumed answer has already from the rest."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tokenloom.request import errors, logprob_columns
from tokenloom.v1.output_processor_pb2 import SlotTextLogprobs

from ..mesh.collector import Delta
from ..records.request_ids import ClientPosition


class Delivered:
    """Decides which output of a resumed answer is new: its deltas come from the beginning, and the client has some."""

    def __init__(self, positions: Mapping[int, ClientPosition]) -> None:
        """``positions``: by output; of outputs that are not named the client has nothing."""
        self._left = dict(positions)  # what the client has beyond the output so far

    @property
    def is_over(self) -> bool:
        """Whether all output that follows is new to the client."""
        return not self._left

    def cut(self, delta: Delta) -> Iterator[tuple[Delta, bool]]:
        """Yield the part of a delta that the client has and the rest, each if it has anything, with whether it is new.

        Raises ``RequestLost`` if the output ends before the client's position.
        """
        left = self._left.get(delta.index)
        if left is None:
            yield delta, True
            return
        num_tokens, num_chars = min(left.num_tokens, len(delta.token_ids)), min(left.num_chars, len(delta.text))
        position = ClientPosition(
            left.num_tokens - num_tokens,
            left.num_chars - num_chars,
            left.finished,
            max(left.num_prompt_logprobs - _num_positions(delta.prompt_logprobs), 0),
        )
        is_reached = position.num_tokens == position.num_chars == 0
        if delta.finished is not None and not is_reached:
            raise errors.RequestLost("The answer is shorter than what was received of it; send the request again.")
        if left.finished:
            self._advance(delta.index, position, is_over=delta.finished is not None)
            yield delta, False
            return
        before, after = _split(delta, num_tokens, num_chars, left.num_prompt_logprobs)
        is_new = is_reached and _has_anything(after)
        self._advance(delta.index, position, is_over=is_new)
        if _has_anything(before):
            yield before, False
        if is_new:
            yield after, True

    def _advance(self, index: int, position: ClientPosition, *, is_over: bool) -> None:
        if is_over:
            del self._left[index]
        else:
            self._left[index] = position


MAX_PIECE = 64
"""Characters of a piece at most."""
_WIDE = "\u2e80-\u2fff\u3001-\U0010ffff"
"""Characters of scripts without spaces between words: a piece ends after each. U+3000 is a space."""
_PIECE = re.compile(rf"\s*(?:[^\s{_WIDE}]+(?=\s)|[^\s{_WIDE}]*[{_WIDE}])")


class TextPieces:
    """Cuts the text of one output into words, at places that the text alone decides.

    Deltas are merged while a client is slow, and a resumed answer comes again in others than the first time. Shaped
    piece by piece, it has the same events each time.
    """

    def __init__(self) -> None:
        self._held = ""  # the beginning of a piece; shorter than MAX_PIECE + 1

    def cut(self, delta: Delta) -> list[Delta]:
        """Return the pieces that are complete with a delta. They have no tokens; the last of the output has its end."""
        text, at, pieces = self._held + delta.text, 0, list[Delta]()
        while (end := _end_of_piece(text, at)) is not None:
            pieces.append(Delta(delta.index, delta.token_index, text[at:end]))
            at = end
        self._held = text[at:]
        if delta.finished is not None:
            pieces.append(Delta(delta.index, delta.token_index, self._held, [], delta.finished))
            self._held = ""
        return pieces


def _end_of_piece(text: str, start: int) -> int | None:
    """Return where a piece ends; None: that depends on what follows."""
    # The window ends one character after the longest piece: with more of the text the answer would be the same.
    if (found := _PIECE.match(text, start, start + MAX_PIECE + 1)) is not None:
        return found.end()
    return start + MAX_PIECE if len(text) - start > MAX_PIECE else None


def _split(delta: Delta, num_tokens: int, num_chars: int, num_prompt: int) -> tuple[Delta, Delta]:
    at = delta.token_index + num_tokens
    before, after = Delta(delta.index, delta.token_index), Delta(delta.index, at)
    before.text, after.text = delta.text[:num_chars], delta.text[num_chars:]
    before.token_ids, after.token_ids = delta.token_ids[:num_tokens], delta.token_ids[num_tokens:]
    before.logprobs, after.logprobs = _cut(delta.logprobs, num_tokens)
    before.prompt_logprobs, after.prompt_logprobs = _cut(delta.prompt_logprobs, num_prompt)
    after.finished = delta.finished
    return before, after


def _has_anything(delta: Delta) -> bool:
    return bool(delta.text or delta.token_ids or delta.prompt_logprobs or delta.finished is not None)


def _num_positions(parts: Sequence[SlotTextLogprobs]) -> int:
    return sum(logprob_columns.num_positions(part.logprobs) for part in parts)


def _cut(parts: Sequence[SlotTextLogprobs], count: int) -> tuple[list[SlotTextLogprobs], list[SlotTextLogprobs]]:
    """Return the first ``count`` positions, and the rest."""
    before, after = list[SlotTextLogprobs](), list[SlotTextLogprobs]()
    for part in parts:
        num_positions = logprob_columns.num_positions(part.logprobs)
        here = min(count, num_positions)
        count -= here
        if here == num_positions:
            before.append(part)
        elif not here:
            after.append(part)
        else:
            before.append(_part(part, 0, here))
            after.append(_part(part, here, num_positions))
    return before, after


def _part(part: SlotTextLogprobs, start: int, stop: int) -> SlotTextLogprobs:
    top = part.logprobs.top
    return SlotTextLogprobs(
        prompt=part.prompt,
        token_index=part.token_index + start,
        logprobs=logprob_columns.part(part.logprobs, start, stop),
        sampled_text=part.sampled_text[start:stop],
        token_text=part.token_text[start * top : stop * top],
        sample_index=part.sample_index,
        first_text=part.first_text if start == 0 else b"",
    )
