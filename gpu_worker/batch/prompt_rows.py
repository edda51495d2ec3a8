"""Holds what prompts of the batch's rows have or ask for beside tokens: their embeddings, of which each step gets those
that it computes, and their log probabilities, which are computed chunk by chunk like the prompts themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.messages import Logprobs

from ..sampler.device.device_sampler import DeviceSampler
from ..sampler.device.sampling_arrays import MOST_LISTED
from ..sampler.host.logprobs import logprobs_of

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


Ranges = Sequence[tuple[int, int]]
"""(begin, end) of positions, in order and without overlap."""


def replaced_ranges(spans: Sequence[EmbedsSpan], media: Sequence[MediaSpan]) -> Ranges:
    """Return the places of a prompt's tokens that have rows in place of an id."""
    own = [(span.position, span.position + len(span.rows)) for span in spans]
    return sorted(own + [(span.position, span.end) for span in media])


def only_tokens(token_ids: Sequence[int], replaced: Ranges) -> list[int]:
    """Return a request's tokens without those that have rows in place of an id."""
    tokens, start = list[int](), 0
    for begin, end in replaced:
        tokens += token_ids[start:begin]
        start = end
    return tokens + list(token_ids[start:])


def mark(token_ids: Int32s, replaced: Ranges) -> Int32s:
    """Return a request's first tokens [n], with a negative number of its own for each that has a row in place of an id:
    such a token equals no other one."""
    marked = token_ids.copy()
    for begin, end in replaced:
        marked[begin:end] = -1 - np.arange(begin, end)[: len(marked[begin:end])]
    return marked


class TokenRows(NamedTuple):
    """Holds the embeddings of consecutive tokens of a step."""

    start: int
    """The first token, in [0, T)."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


class PromptEmbeds:
    """Maps rows of the input batch to their embeddings."""

    def __init__(self) -> None:
        self.spans: dict[int, list[EmbedsSpan]] = {}
        """Those of the rows that have any; only the methods change it."""
        self.live: dict[int, int] = {}
        """By row: the position behind its last embedding, until the step that computes that has been gathered."""

    def add(self, row: int, spans: list[EmbedsSpan], num_computed: int = 0) -> None:
        """Note the embeddings of a row of whose tokens ``num_computed`` have their KV."""
        self.spans[row] = spans
        end = spans[-1].position + len(spans[-1].rows)
        if num_computed < end:
            self.live[row] = end

    def remove(self, row: int) -> None:
        """Drop the embeddings of a row, if it has any."""
        self.spans.pop(row, None)
        self.live.pop(row, None)

    def settle(self, rows: Ints, ends: Int32s) -> None:
        """Note that tokens up to these positions of these rows are computed in the step, both [R]."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            if end >= self.live.get(row, end + 1):
                del self.live[row]

    def gather(
        self, rows: Ints, starts: Ints, lengths: Ints, cu_query_lens: npt.NDArray[np.int32]
    ) -> Sequence[TokenRows]:
        """Select the embeddings that fall into a step. The step computes ``lengths`` tokens from position ``starts`` on
        of each of these rows, which begin at ``cu_query_lens`` in the step."""
        found = []
        columns = zip(rows.tolist(), starts.tolist(), lengths.tolist(), cu_query_lens.tolist(), strict=False)
        for row, start, length, offset in columns:
            for span in self.spans[row] if row in self.live else ():
                first, last = max(span.position, start), min(span.position + len(span.rows), start + length)
                if first < last:
                    part = span.rows[first - span.position : last - span.position]
                    found.append(TokenRows(offset + first - start, part))
        return found


_SLICE = 64
"""How many rows of logits are computed at once; those of a whole chunk may be larger than the model."""


class PendingPositions(Protocol):
    """Holds log probabilities of consecutive positions that may be on their way to the host."""

    def wait(self) -> Sequence[Logprobs]: ...


@dataclass(frozen=True, slots=True)
class Positions:
    """Holds log probabilities that the host has computed."""

    logprobs: Logprobs

    def wait(self) -> Sequence[Logprobs]:
        return [self.logprobs]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Holds the log probabilities of the prompt tokens of one step."""

    num_top: int
    slices: Sequence[PendingPositions]

    def wait(self) -> Logprobs:
        """Return them once they are on the host."""
        result = Logprobs([], [], self.num_top)
        for each in self.slices:
            for positions in each.wait():
                result.extend(positions)
        return result


class PromptLogprobRows(dict[int, tuple[int, Sequence[int]]]):
    """Holds the batch rows whose prompt log probabilities are not complete. A step without such rows costs one dict
    lookup.

    Only requests without output are among them: the first token and the prompt's log probabilities leave together.
    """

    are_kept = True
    """Whether this rank gets all logits; otherwise it only computes its part, for which the rank that draws waits."""

    def add(self, row: int, params: CoreSamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Add a request with these tokens, also when it comes back from a preemption."""
        if params.prompt_logprobs is not None and len(token_ids) == num_prompt_tokens:
            self[row] = params.prompt_logprobs, token_ids

    def compute(
        self,
        row: int,
        start: int,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        device_sampler: DeviceSampler | None = None,
    ) -> PromptPart | None:
        """Return the log probabilities of the prompt tokens that follow positions ``start`` and after.

        ``hidden`` are those positions', [n, hidden_size]. ``device_sampler`` finds the log probabilities where the
        logits are; None: the logits come to the host. Returns None if the row asks for none, or for none any more.
        """
        if row not in self:
            return None
        num_top, slices = self[row][0], list[PendingPositions]()
        for followers, states in self._take(row, start, hidden):
            logits = compute_logits(states)
            if not self.are_kept:
                continue
            # What stands for an image may lie above the vocabulary.
            targets = [min(each, logits.shape[1] - 1) for each in followers]
            if device_sampler is not None and num_top <= MOST_LISTED:
                slices.append(device_sampler.start_logprobs(logits, targets, num_top))
            else:
                slices.append(Positions(logprobs_of(logits.cpu().numpy(), targets, num_top)))
        return PromptPart(num_top, slices)

    def _take(self, row: int, start: int, hidden: Tensor) -> list[tuple[Sequence[int], Tensor]]:
        """Return some following tokens and the states before them at a time. A row whose prompt ends with them is
        removed."""
        token_ids = self[row][1]
        if start + len(hidden) == len(token_ids):
            del self[row]
        followers = token_ids[start + 1 : start + 1 + len(hidden)]
        found = []
        for first in range(0, len(followers), _SLICE):
            some = followers[first : first + _SLICE]
            found.append((some, hidden[first : first + len(some)]))
        return found
