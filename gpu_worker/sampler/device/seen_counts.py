"""Keeps on the device which tokens the rows with penalties have seen, and how often they are in the outputs."""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from ...device.device_link import copy_packed
from ..host.logits_processor import SeenTokens

# A word for each token of the vocabulary, 0.6 MB for 151,936 of them. A list of distinct tokens, as the host has, is
# smaller, but each count would search it.
SEEN = 1 << 30
"""Is set in the word of a token that prompt or output contain; the bits below it count the output."""
_FIRST_SLOTS = 8


class SeenCounts:
    """Holds a row of counts, a *slot*, for each request with penalties. Belongs to one thread.

    The device counts the tokens that it draws, so a slot is written once, and again only if the host has drawn tokens
    of its request meanwhile. It is free again when the batch forgets the request. No memory is taken before the first
    such request.
    """

    def __init__(self, device: torch.device, vocab: int) -> None:
        self._device = device
        self._vocab = vocab
        self.words = torch.empty(0, vocab, dtype=torch.int32, device=device)
        """[slots, vocab]; see ``kernels.triton.change_logits.change_rows``."""
        self._slot_of: WeakKeyDictionary[SeenTokens, _Slot] = WeakKeyDictionary()

    def slot(self, seen: SeenTokens, output_index: int) -> int | None:
        """Return the slot of a request with the counts of its first ``output_index`` output tokens, and expect that the
        device counts the next one. None: the device has no memory for it.

        Tokens that the host does not know yet are those that the device has counted.
        """
        slot = self._slot_of.get(seen)
        if slot is None:
            index = self._free_index()
            if index is None:
                return None
            slot = self._slot_of[seen] = _Slot(index)
        if slot.num_outputs != output_index:
            assert seen.num_outputs == output_index, "the host or the device has counted every output token"
            self._write(slot.index, *seen.columns())
        slot.num_outputs = output_index + 1
        return slot.index

    def _free_index(self) -> int | None:
        used = {slot.index for slot in self._slot_of.values()}
        if len(used) == len(self.words) and not self._grow():
            return None
        return next(index for index in range(len(self.words)) if index not in used)

    def _grow(self) -> bool:
        """Make room for twice as many slots. Returns whether there is more room now."""
        before = len(self.words)
        try:
            words = torch.empty(max(_FIRST_SLOTS, 2 * before), self._vocab, dtype=torch.int32, device=self._device)
        except torch.OutOfMemoryError:
            return False
        words[:before] = self.words
        self.words = words
        return True

    def _write(self, index: int, token_ids: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]) -> None:
        words = self.words[index]
        words.zero_()
        if len(token_ids):
            where, content = copy_packed([token_ids, counts | np.int32(SEEN)], self._device)
            words[where] = content


@dataclass(slots=True)
class _Slot:
    index: int
    num_outputs: int = -1
    """Output tokens that the slot counts, the one included that the device draws next; -1: nothing is written."""
