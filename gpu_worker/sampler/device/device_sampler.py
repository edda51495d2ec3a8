"""Draws the tokens of a step on the device, so that only their ids and log probabilities come to the host, and keeps
there which tokens the rows with penalties have seen, and how often they are in the outputs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams

from ...device.device_link import DeviceLink, copy_packed, link_of
from ..host.logits_processors import RowEdit, SeenTokens, pack_bits
from ..host.sampler import NO_TOKEN
from .sampling_arrays import (
    MOST_LISTED,
    EditArrays,
    FoundLogprobs,
    LogprobArrays,
    PendingLogprobs,
    PendingTokens,
    SampledRows,
    SamplingArrays,
)

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
        """[slots, vocab]; see ``kernels.triton.logits.change_rows``."""
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


NO_CHOICE = -2
"""Stands for the token of a row whose logits are all -inf."""


class SamplerKernels(Protocol):
    """Computes on the device, and waits for nothing."""

    def draw(self, logits: Tensor, columns: Sequence[Tensor]) -> Tensor:
        """Draw from float32 logits [rows, vocab] with the columns of :class:`SamplingArrays`. Returns [rows] int64:
        ``NO_TOKEN`` where no logit is finite, and ``NO_CHOICE`` where all of them are -inf."""

    def change(self, logits: Tensor, edits: Sequence[Tensor], seen: Tensor) -> None:
        """Change logits [rows, vocab] in place, by the arrays of :class:`EditArrays` and the words [slots, vocab] of
        :class:`SeenCounts`."""

    def count(self, seen: Tensor, edits: Sequence[Tensor], drawn: Tensor) -> None:
        """Count the tokens ``drawn`` [rows] of the edits that have a slot; a negative one is token 0."""

    def find_logprobs(
        self, logits: Tensor, wanted: Sequence[Tensor], token_ids: Tensor, most_listed: int
    ) -> FoundLogprobs:
        """Return what log probabilities of tokens [n] need. ``logits`` [n, vocab] are those of the rows that ask;
        ``wanted`` are the arrays of :class:`LogprobArrays` but for the first."""


class DevicePlugin(Protocol):
    """Changes logits by a plugin, where they lie."""

    def apply_on_device(self, logits: Tensor, index_of: Mapping[int, int]) -> None:
        """Change logits [rows, vocab] in place: the rows ``index_of[row]`` of those rows of the batch that ask."""


@dataclass(frozen=True, slots=True)
class RowDemands:
    """Says what single rows of a step ask for, beside the draw of a token."""

    edits: dict[int, RowEdit]
    """By row of the logits."""
    logprobs: dict[int, tuple[int, Sequence[int]]]
    """How many of the best tokens, and which others, by row of the logits."""
    plugged: dict[int, int] = field(default_factory=dict)
    """The rows of the batch whose edits are plugged, by row of the logits."""
    plugins: Sequence[DevicePlugin] = ()
    """What changes them, one after the other."""


NOTHING: Final = RowDemands({}, {})


@dataclass(frozen=True, slots=True)
class _DemandArrays:
    """Holds what the device gets of :class:`RowDemands`."""

    edits: EditArrays | None
    wanted: LogprobArrays | None
    left_out: Collection[int]
    plugins: Sequence[DevicePlugin] = ()
    plugged: Mapping[int, int] = field(default_factory=dict)
    """Rows of the logits by those of the batch."""
    later: EditArrays | None = None
    """What follows the plugins."""

    def arrays(self) -> list[npt.NDArray[Any]]:
        return [array for part in (self.edits, self.later, self.wanted) if part is not None for array in part]


_NO_DEMANDS: Final = _DemandArrays(None, None, ())


class DeviceSampler:
    """Draws one token for each row, on the device of the logits, by the rule and with the numbers of the host's.

    Belongs to one thread.
    """

    def __init__(self, kernels: SamplerKernels, link: DeviceLink | None = None) -> None:
        """``link`` brings the results to the host; None: as the device of the logits does."""
        self._kernels = kernels
        self._link = link
        self._seen: SeenCounts | None = None  # once a request has penalties, or the device changes anything

    @torch.inference_mode()
    def start(
        self,
        logits: Tensor,
        params: Sequence[CoreSamplingParams],
        output_indices: npt.NDArray[np.int64],
        demands: RowDemands = NOTHING,
    ) -> SampledRows:
        """Let the device change float32 logits [rows, vocab] in place and draw. It does not wait: there is one copy to
        the device, and then one back of each result. ``output_indices`` [rows] are those of the tokens to draw.

        A greedy row takes the largest logit, among equals the lowest id.
        """
        draws = SamplingArrays.of(params, output_indices)
        demanded = self._demand_arrays(logits, output_indices, demands)
        moved = copy_packed([*draws, *demanded.arrays()], logits.device)
        return self._start(logits, moved[: len(draws)], demanded, moved[len(draws) :])

    @torch.inference_mode()
    def start_with(
        self,
        logits: Tensor,
        columns: Sequence[Tensor],
        output_indices: npt.NDArray[np.int64],
        demands: RowDemands = NOTHING,
    ) -> SampledRows:
        """Do what :meth:`start` does with the columns of :class:`SamplingArrays`, which the device has. Only what rows
        ask for beside a token is copied to it."""
        demanded = self._demand_arrays(logits, output_indices, demands)
        arrays = demanded.arrays()
        return self._start(logits, columns, demanded, copy_packed(arrays, logits.device) if arrays else [])

    def _start(
        self, logits: Tensor, columns: Sequence[Tensor], demanded: _DemandArrays, moved: Sequence[Tensor]
    ) -> SampledRows:
        num_edited = 0 if demanded.edits is None else len(demanded.edits)
        num_later = 0 if demanded.later is None else len(demanded.later)
        edits, later, wanted = (
            moved[:num_edited],
            moved[num_edited : num_edited + num_later],
            moved[num_edited + num_later :],
        )
        own = logits.index_select(0, wanted[0]) if wanted else logits  # before they are changed
        if edits:
            # On the device: a penalty, a mask or log probabilities of one request once brought the logits of all of
            # them to the host and cost a wait.
            self._kernels.change(logits, edits, self._words(logits))
        for plugin in demanded.plugins:
            plugin.apply_on_device(logits, demanded.plugged)
        if later:
            self._kernels.change(logits, later, self._words(logits))
        drawn = self._kernels.draw(logits, columns)
        for arrays, tensors in ((demanded.edits, edits), (demanded.later, later)):
            if arrays is not None and (arrays.slot_of >= 0).any():
                self._kernels.count(self._words(logits), tensors, drawn)
        link, logprobs = self._link or link_of(logits.device), None
        if demanded.wanted is not None:
            own_tokens, most_listed = drawn.index_select(0, wanted[0]), int(demanded.wanted.listed.max())
            found = self._kernels.find_logprobs(own, wanted[1:], own_tokens, most_listed)
            logprobs = PendingLogprobs.fetch(demanded.wanted, found, link)
        return SampledRows(drawn, PendingTokens.fetch(drawn, link), logprobs, demanded.left_out)

    def _words(self, logits: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = SeenCounts(logits.device, logits.shape[1])
        return self._seen.words

    def _demand_arrays(
        self, logits: Tensor, output_indices: npt.NDArray[np.int64], demands: RowDemands
    ) -> _DemandArrays:
        """Return what the rows ask for in columns, but for the rows that the device cannot serve."""
        if not demands.edits and not demands.logprobs:
            return _NO_DEMANDS
        left_out = {row for row, (top, named) in demands.logprobs.items() if top + len(named) > MOST_LISTED}
        slots: dict[int, int] = {}
        for row, edit in demands.edits.items():
            is_left = row in left_out or edit.on_host
            slot = None if is_left else self._slot(logits, edit, int(output_indices[row]))
            if slot is None:
                left_out.add(row)
            else:
                slots[row] = slot
        edits = {row: demands.edits[row] for row in slots}
        rows, vocab = [row for row in demands.logprobs if row not in left_out], logits.shape[1]
        wanted = LogprobArrays.of(rows, [demands.logprobs[row] for row in rows], vocab) if rows else None
        if not demands.plugged:
            return _DemandArrays(_arrays(edits, slots, vocab), wanted, left_out)
        plugged = {demands.plugged[row]: row for row, edit in edits.items() if edit.is_plugged}
        # Plugins see what masks and biases left, as on the host, so what follows them is a second change.
        split = {row: edits[row].split() for row in plugged.values()}
        first = edits | {row: before for row, (before, _) in split.items()}
        return _DemandArrays(
            _arrays({row: edit for row, edit in first.items() if not edit.is_empty}, slots, vocab),
            wanted,
            left_out,
            demands.plugins,
            plugged,
            _arrays({row: after for row, (_, after) in split.items() if not after.is_empty}, slots, vocab),
        )

    def _slot(self, logits: Tensor, edit: RowEdit, output_index: int) -> int | None:
        """Return the slot of a row's counts, -1 without penalties; None: the device has no memory for it."""
        if edit.penalties is None:
            return -1
        if self._seen is None:
            self._seen = SeenCounts(logits.device, logits.shape[1])
        return self._seen.slot(edit.penalties[0], output_index)

    def prepare(self, logits: Tensor) -> None:
        """Compile the kernels that rows need which ask for more than a token; logits [1, vocab] are not changed."""
        params = CoreSamplingParams(max_tokens=1, seed=0)
        edit = RowEdit([np.zeros(1, np.int64)], [pack_bits(np.arange(2))], penalties=(SeenTokens([0]), params))
        self.start(logits.clone(), [params], np.zeros(1, np.int64), RowDemands({0: edit}, {0: (1, ())})).tokens.wait()
        self._seen = None

    @torch.inference_mode()
    def start_logprobs(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> PendingLogprobs:
        """Let the device find log probabilities of given tokens [n] from logits [n, vocab], and of the best:
        ``num_top`` of each row, at most ``MOST_LISTED``."""
        wanted = LogprobArrays.of(range(len(token_ids)), [(num_top, ())] * len(token_ids), logits.shape[1])
        tokens, *columns = copy_packed([np.array(token_ids, np.int64), *wanted[1:]], logits.device)
        found = self._kernels.find_logprobs(logits, columns, tokens, int(wanted.num_tops.max()))
        return PendingLogprobs.fetch(wanted, found, self._link or link_of(logits.device))

    def sample(
        self, logits: Tensor, params: Sequence[CoreSamplingParams], output_indices: npt.NDArray[np.int64]
    ) -> list[int]:
        """Do what :meth:`start` does and wait for the token ids; ``NO_TOKEN`` if no logit is finite."""
        return [max(token_id, NO_TOKEN) for token_id in self.start(logits, params, output_indices).tokens.wait()]


def _arrays(edits: Mapping[int, RowEdit], slots: Mapping[int, int], vocab: int) -> EditArrays | None:
    """Put edits by row of the logits into columns; the counts of one without penalties are not looked at."""
    chosen = [-1 if edit.penalties is None else slots[row] for row, edit in edits.items()]
    return EditArrays.of(list(edits), list(edits.values()), chosen, vocab) if edits else None
