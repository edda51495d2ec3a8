"""Proposes the tokens that followed the latest tokens when they last occurred, in the prompt or in the output."""

from collections.abc import Mapping, Sequence
from itertools import takewhile

from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

from ..batch.input_batch import InputBatch, Ints, StepInputs
from .speculation import StepArrays


class NgramProposer:
    """Fulfils :class:`~.speculation.Proposer`."""

    def __init__(self, batch: InputBatch, shortest: int, longest: int) -> None:
        """Between ``shortest`` and ``longest`` tokens must have occurred before; the most that have are used."""
        self._batch = batch
        self._lengths = (shortest, longest)
        self._indexes: dict[str, SuffixIndex] = {}

    def update(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids + step.preempted_req_ids:
            self._indexes.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            self._indexes.pop(new.req_id, None)

    def make_kv_caches(self) -> None:
        """Do nothing: no model drafts."""

    def drop_kv_caches(self) -> None:
        """Do nothing."""

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Do nothing."""

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        proposed = {}
        for req_id, count in wanted.items():
            index = self._indexes.get(req_id)
            if index is None:
                index = self._indexes[req_id] = SuffixIndex(*self._lengths)
            index.extend(self._batch.known_tokens(req_id)[len(index) :].tolist())
            if drafts := index.propose(count):
                proposed[req_id] = drafts
        return proposed


class SuffixIndex:
    """Finds where the last tokens of a growing sequence occurred before. A token costs a fixed number of lookups."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._token_ids: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}
        """The place after the latest occurrence of some tokens that has a token after it."""

    def __len__(self) -> int:
        """Return how many tokens the sequence has."""
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        known, follower = self._token_ids, self._follower
        for token_id in token_ids:
            end = len(known)
            for length in self._lengths:
                if length <= end:
                    follower[tuple(known[end - length :])] = end
            known.append(token_id)

    def propose(self, count: int) -> list[int]:
        """Return ``count`` tokens that may follow; none if the last tokens did not occur before. Negative numbers stand
        for embeddings, and end what may follow.

        An occurrence that overlaps the end continues in the proposal itself, so a short cycle is repeated.
        """
        known = self._token_ids
        for length in self._lengths:
            if length <= len(known) and (place := self._follower.get(tuple(known[-length:]))) is not None:
                found = known[place : place + count]
                for offset in range(len(found), count):
                    found.append(found[offset - (len(known) - place)])
                return found if min(found) >= 0 else list(takewhile(lambda token_id: token_id >= 0, found))
        return []
