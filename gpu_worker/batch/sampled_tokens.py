"""Passes drawn tokens, and drafts of the next ones, from the rank that draws them to the others."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenloom.engine_core.data.scheduler_output import UNKNOWN_DRAFT, SchedulerOutput

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
    drafted: Sequence[str]
    """[S]: the requests of these rows, if drafts of their next tokens follow; otherwise empty."""
    most_kept: int
    """Of these drafts, for a request."""


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
        self.proposed: Mapping[str, list[int]] = {}
        """Drafts that follow the tokens taken last, by request."""

    def publish(self, token_ids: Ints) -> None:
        """Send the tokens of a step to the other ranks: [S], or [S, 1 + most drafts] if it verified drafts."""
        tokens = torch.from_numpy(token_ids)
        for rank in self._others:
            self._peers.send(tokens, rank)

    def publish_drafts(self, req_ids: Sequence[str], proposed: Mapping[str, list[int]], most_kept: int) -> None:
        """Send the drafts after the tokens of these requests [S], at most ``most_kept`` of each, to the other ranks."""
        drafts = np.full((len(req_ids), most_kept), UNKNOWN_DRAFT, dtype=np.int64)
        for row, req_id in zip(drafts, req_ids, strict=True):
            found = proposed.get(req_id, ())
            row[: len(found)] = found
        self.publish(drafts)

    def expect(
        self, req_ids: list[str], rows: Ints, most_drafts: int, drafted: Sequence[str] = (), most_kept: int = 0
    ) -> None:
        """Note that these rows [S] of these requests get tokens in the step that this rank has just computed, and that
        drafts of the requests ``drafted`` [S] follow, at most ``most_kept`` of each."""
        self._expected.append(_Expected(frozenset(req_ids), rows.copy(), most_drafts, drafted, most_kept))

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
            if oldest.drafted:
                self._take_drafts(oldest)

    def _take_drafts(self, step: _Expected) -> None:
        shape = (len(step.drafted), step.most_kept)
        drafts = self._peers.receive(shape, torch.int64, self._output_rank).tolist()
        self.proposed = {
            req_id: [token_id for token_id in row if token_id != UNKNOWN_DRAFT]
            for req_id, row in zip(step.drafted, drafts, strict=True)
        }
