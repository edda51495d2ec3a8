"""What the rows of a step change in their logits, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..host.row_edit import RowEdit, Words

Int32s = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EditArrays:
    """Holds what ``kernels.triton.change_logits`` reads, a place for each edit."""

    rows: Int32s
    """[edits]: rows of the step's logits, each once."""
    starts: Int32s
    """[edits + 1]: where the tokens of each edit begin in the next two."""
    token_ids: Int32s
    values: npt.NDArray[np.float32]
    mask_of: Int32s
    """[edits]: an index of ``masks``; -1: none."""
    masks: Int32s
    """[m, ceil(vocab / 32)]: bit i of word w is set if token 32 * w + i is allowed."""
    slot_of: Int32s
    """[edits]: a slot of :class:`~.seen_counts.SeenCounts`; -1: no penalties."""
    repetitions: Doubles
    presences: Doubles
    frequencies: Doubles
    forced: Int32s
    """[edits]: the only token that may be drawn; -1: none."""

    @classmethod
    def of(cls, rows: Sequence[int], edits: Sequence[RowEdit], slots: Sequence[int], vocab: int) -> "EditArrays":
        """Put the edits of these rows into columns. ``slots`` [edits]: those of :class:`~.seen_counts.SeenCounts`."""
        listed = [edit.listed() for edit in edits]
        lengths = [len(token_ids) for token_ids, _ in listed]
        masked = [index for index, edit in enumerate(edits) if edit.allowed]
        mask_of = np.full(len(edits), -1, dtype=np.int32)
        mask_of[masked] = np.arange(len(masked))
        width = -(-vocab // 32)
        return cls(
            rows=np.array(rows, dtype=np.int32),
            starts=np.cumsum([0, *lengths], dtype=np.int32),
            token_ids=np.concatenate([token_ids for token_ids, _ in listed]).astype(np.int32),
            values=np.concatenate([values for _, values in listed]),
            mask_of=mask_of,
            masks=np.array([_join(edits[index].allowed, width) for index in masked], dtype=np.int32).reshape(-1, width),
            slot_of=np.array(slots, dtype=np.int32),
            repetitions=_penalties(edits, "repetition_penalty", 1.0),
            presences=_penalties(edits, "presence_penalty", 0.0),
            frequencies=_penalties(edits, "frequency_penalty", 0.0),
            forced=np.array([edit.forced for edit in edits], dtype=np.int32),
        )

    def in_order(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays in the order of the fields."""
        return (
            self.rows,
            self.starts,
            self.token_ids,
            self.values,
            self.mask_of,
            self.masks,
            self.slot_of,
            self.repetitions,
            self.presences,
            self.frequencies,
            self.forced,
        )


def _join(bitmasks: Sequence[Words], width: int) -> Words:
    """Return the bitmask, [width], of the tokens that all of these allow."""
    joined = np.full(width, -1, dtype=np.int32)
    for words in bitmasks:
        joined[: len(words)] &= words[:width]
        joined[len(words) :] = 0
    return joined


def _penalties(edits: Sequence[RowEdit], name: str, default: float) -> Doubles:
    values = [default if edit.penalties is None else getattr(edit.penalties[1], name) for edit in edits]
    return np.array(values, dtype=np.float64)
