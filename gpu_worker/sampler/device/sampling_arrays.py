"""What the rows of a step ask of the device in columns: how their next tokens are drawn, changes of their logits, and
log probabilities; and what the device draws and finds for them, on its way to the host."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import Logprobs

from ...device.device_link import DeviceLink, Event
from ..host.logits_processors import RowEdit, Words
from ..host.sampler import REAL_PARAMETERS, Purpose, real_parameters, uniform


class SamplingArrays(NamedTuple):
    """Holds what rows ask for, and which of them draw; see ``kernels.triton.sample``."""

    temperatures: npt.NDArray[np.float64]
    top_ps: npt.NDArray[np.float64]
    min_ps: npt.NDArray[np.float64]
    numbers: npt.NDArray[np.float64]
    top_ks: npt.NDArray[np.int32]
    asking: npt.NDArray[np.int64]
    """[S]: where each row of the logits finds its parameters; ``numbers`` are in the order of the logits."""

    @classmethod
    def of(cls, params: Sequence[CoreSamplingParams], output_indices: npt.NDArray[np.int64]) -> "SamplingArrays":
        """Read the parameters of rows, and compute the uniform numbers of their next draws as the host's rule does."""
        seeds = np.array([each.seed for each in params], dtype=np.uint64)
        reals = np.array([real_parameters(each) for each in params], dtype=np.float64)
        temperatures, top_ps, min_ps = np.ascontiguousarray(reals.reshape(-1, len(REAL_PARAMETERS)).T)
        return cls(
            temperatures=temperatures,
            top_ps=top_ps,
            min_ps=min_ps,
            numbers=uniform(seeds, output_indices.astype(np.uint64), Purpose.SAMPLE),
            top_ks=np.array([max(0, each.top_k) for each in params], dtype=np.int32),
            asking=np.arange(len(params)),
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Holds on the device what the rows that draw in a step ask for; see ``kernels.triton.sample``."""

    columns: tuple[Tensor, ...]
    """As ``SamplingArrays``; parameters of all rows of the batch."""
    rows: Tensor
    """[S] int64."""
    last_tokens: Tensor
    """[all rows] int64"""

    @torch.inference_mode()
    def keep(self, token_ids: Tensor) -> None:
        """Make ``token_ids`` [S], of which -1 stands for none, the tokens that the rows drew last."""
        self.last_tokens.index_copy_(0, self.rows, token_ids.clamp(min=0))


Int32s = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]


class EditArrays(NamedTuple):
    """Holds what ``kernels.triton.logits`` reads, a place for each edit."""

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
    """[edits]: a slot of :class:`~.device_sampler.SeenCounts`; -1: no penalties."""
    repetitions: Doubles
    presences: Doubles
    frequencies: Doubles
    forced: Int32s
    """[edits]: the only token that may be drawn; -1: none."""

    @classmethod
    def of(cls, rows: Sequence[int], edits: Sequence[RowEdit], slots: Sequence[int], vocab: int) -> "EditArrays":
        """Put the edits of these rows into columns. ``slots`` [edits]: of :class:`~.device_sampler.SeenCounts`."""
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


MOST_LISTED = 1024
"""Tokens of one row whose log probabilities the device lists; a row that asks for more comes to the host."""


class LogprobArrays(NamedTuple):
    """Holds what ``kernels.triton.logits`` reads, a place for each row that asks."""

    rows: npt.NDArray[np.int64]
    """[asking]: rows of the logits."""
    num_tops: Int32s
    """[asking]: how many of the best tokens are wanted."""
    also_starts: Int32s
    """[asking + 1]: where the named tokens of each row begin in ``also_ids``."""
    also_ids: Int32s

    @classmethod
    def of(cls, rows: Sequence[int], wanted: Sequence[tuple[int, Sequence[int]]], vocab: int) -> Self:
        """Put into columns how many of the best tokens each row asks for, and which it names."""
        lengths = [len(named) for _, named in wanted]
        return cls(
            rows=np.array(rows, dtype=np.int64),
            num_tops=np.array([min(num_top, vocab) for num_top, _ in wanted], dtype=np.int32),
            also_starts=np.cumsum([0, *lengths], dtype=np.int32),
            also_ids=np.array([token_id for _, named in wanted for token_id in named], dtype=np.int32),
        )

    @property
    def listed(self) -> Int32s:
        """Return how many tokens each row lists, [asking], without its own."""
        return self.num_tops + np.diff(self.also_starts)


class FoundLogprobs(NamedTuple):
    """Holds what the device found, on the device or on the host; n rows ask, and K is the most tokens of a row."""

    token_ids: Tensor
    """[n, 1 + K] int32: the row's token, the best tokens by ascending id, and those that it names."""
    logits: Tensor
    """[n, 1 + K] float32, of the same tokens."""
    ranks: Tensor
    """[n] int32 of the row's token."""
    normalizers: Tensor
    """[n] float64: the logarithm of the sum of exponentials; NaN if the largest logit is not finite."""

    def read(self, arrays: LogprobArrays) -> list[Logprobs]:
        """Return one position for each row that asks, from results on the host."""
        ids, logits, ranks, normalizers = (tensor.numpy() for tensor in self)
        columns = zip(arrays.num_tops.tolist(), arrays.listed.tolist(), ranks.tolist(), strict=True)
        return [
            _position(ids[place, : 1 + listed], logits[place, : 1 + listed], num_top, rank, normalizers[place])
            for place, (num_top, listed, rank) in enumerate(columns)
        ]


def _position(
    ids: Int32s, logits: npt.NDArray[np.float32], num_top: int, rank: int, normalizer: np.float64
) -> Logprobs:
    best = 1 + np.argsort(-logits[1 : 1 + num_top], kind="stable")  # the lower id stays first
    listed = ids[np.concatenate([best, np.arange(1 + num_top, len(ids))])]
    values = logits[np.concatenate([[0], best, np.arange(1 + num_top, len(ids))])].astype(np.float64) - normalizer
    if np.isnan(normalizer):  # there is no order: the first tokens stand for the best
        listed[:num_top] = np.arange(num_top)
        values[:] = np.nan
    sampled, *others = values.tolist()
    return Logprobs([sampled], [rank], len(listed), listed.tolist(), others)


class PendingTokens:
    """Holds token ids [rows] that the device has drawn or will draw. Any thread may wait for them."""

    def __init__(self, on_host: Tensor, event: Event) -> None:
        """``on_host``: int64, on the host, without content until the event."""
        self._on_host = on_host
        self._event = event

    @classmethod
    def fetch(cls, token_ids: Tensor, link: DeviceLink) -> "PendingTokens":
        """Begin to copy ``token_ids`` [rows] int64 to the host."""
        on_host = link.host_memory(token_ids.numel() * token_ids.element_size()).view(torch.int64)
        link.fetch(on_host, token_ids)
        return cls(on_host, link.event())

    def has_arrived(self) -> bool:
        """Return whether the token ids are there, without waiting."""
        return self._event.query()

    def wait(self) -> list[int]:
        """Return the token ids, once they are there. Nothing later of the device is waited for."""
        if not self._event.query():
            self._event.synchronize()
        token_ids: list[int] = self._on_host.tolist()
        return token_ids


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Holds log probabilities that are on their way to the host. Any thread may wait for them."""

    wanted: LogprobArrays
    on_host: FoundLogprobs
    """Without content until the event."""
    event: Event

    @classmethod
    def fetch(cls, wanted: LogprobArrays, found: FoundLogprobs, link: DeviceLink) -> Self:
        """Begin to copy what the device found."""
        copies = [_fetch(tensor, link) for tensor in found]
        return cls(wanted, FoundLogprobs(*copies), link.event())

    def wait(self) -> list[Logprobs]:
        """Return a position for each row that asks, once it is there."""
        if not self.event.query():
            self.event.synchronize()
        return self.on_host.read(self.wanted)

    def by_row(self) -> dict[int, Logprobs]:
        """Return the same by row of the logits."""
        return dict(zip(self.wanted.rows.tolist(), self.wait(), strict=True))


def _fetch(tensor: Tensor, link: DeviceLink) -> Tensor:
    target = link.host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    link.fetch(target, tensor)
    return target


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Holds the tokens of a step, and the log probabilities that its rows asked for."""

    token_ids: Tensor
    """[rows] int64 on the device: ``NO_TOKEN`` where no logit is finite, and ``NO_CHOICE`` where all are -inf."""
    tokens: PendingTokens
    """The same, for the host."""
    logprobs: PendingLogprobs | None
    """None: no row asks for any."""
    left_out: Collection[int]
    """Rows that the device did not serve: their logits are as they were, and their tokens mean nothing."""

    def wait_for_logprobs(self) -> dict[int, Logprobs]:
        """Return the log probabilities by row, once they are there."""
        return {} if self.logprobs is None else self.logprobs.by_row()
