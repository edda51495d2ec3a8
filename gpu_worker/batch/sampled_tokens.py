"""Passes drawn tokens from the rank that draws them to the others."""

from collections import deque
from dataclasses import dataclass

import torch

from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

from ..parallel.ranks import Ranks
from .input_batch import InputBatch, Ints


@dataclass(frozen=True, slots=True)
class _Expected:
    """Describes tokens that the drawing rank has sent, or will send."""

    req_ids: frozenset[str]
    rows: Ints
    """[S]: rows of the batch that get tokens."""
    most_drafts: int
    """Of a row: each gets a token and as many of its drafts as are accepted."""


class SampledTokens:
    """Brings the tokens of every step into the batches of all ranks, although one rank draws them.

    A rank of an earlier stage takes them only when a step needs them: until then it computes steps of other requests.
    """

    def __init__(self, ranks: Ranks, batch: InputBatch) -> None:
        assert ranks.tokens is not None, "a rank that is alone draws its tokens"
        self._peers = ranks.tokens
        self._others = ranks.others
        self._output_rank = ranks.place.output_rank
        self._batch = batch
        self._expected: deque[_Expected] = deque()  # bounded by the steps in flight

    def publish(self, token_ids: Ints) -> None:
        """Send the tokens of a step to the other ranks: [S], or [S, 1 + most drafts] if it verified drafts."""
        tokens = torch.from_numpy(token_ids)
        for rank in self._others:
            self._peers.send(tokens, rank)

    def expect(self, req_ids: list[str], rows: Ints, most_drafts: int) -> None:
        """Note that these rows [S] of these requests get tokens in the step that this rank has just computed."""
        self._expected.append(_Expected(frozenset(req_ids), rows.copy(), most_drafts))

    def settle(self, step: SchedulerOutput) -> None:
        """Take the tokens that ``step`` needs, and those drawn before them."""
        # In order, although only a later step may be touched: the tokens travel over one connection, one step after the
        # other.
        if not self._expected:
            return
        touched = [*step.num_scheduled_tokens, *step.finished_req_ids, *step.preempted_req_ids]
        while any(not each.req_ids.isdisjoint(touched) for each in self._expected):
            oldest = self._expected.popleft()
            shape = oldest.rows.shape + ((oldest.most_drafts + 1,) if oldest.most_drafts else ())
            tokens = self._peers.receive(shape, torch.int64, self._output_rank).numpy()
            for column in tokens.reshape(len(oldest.rows), -1).T:
                is_kept = column >= 0
                self._batch.append(oldest.rows[is_kept], column[is_kept])
