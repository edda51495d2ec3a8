"""Decides beam searches, without I/O: which beams continue, which have ended and which are best, with vLLM's scores.

The caller computes, for each live beam, the likeliest next tokens of the beam's whole sequence; the search makes the
next beams of them. The offline API and the gateway do so with requests of one token, whose prefix hits the cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from .errors import InvalidArgument

Row = TypeVar("Row")
MAX_LENGTH_PENALTY = 10.0
"""Limits ``length_penalty`` in both directions, so that no score overflows."""


def num_candidates(width: int, *, vocab_size: int, max_logprobs: int, field: str) -> int:
    """Return how many next tokens are considered after each beam: twice the width, as far as the vocabulary reaches.

    ``max_logprobs``: as many as the engine returns for a token. Raises ``InvalidArgument`` naming ``field`` if these
    are too few.
    """
    if width > vocab_size:
        raise InvalidArgument(f"{field} is {width}, but the model has only {vocab_size} tokens", field)
    wanted = min(2 * width, vocab_size)
    if wanted > max_logprobs < vocab_size:
        raise InvalidArgument(
            f"{field} is {width}: a beam search compares {wanted} log probabilities of each token, but max_logprobs "
            f"is {max_logprobs}, so {field} may be at most {max_logprobs // 2}",
            field,
        )
    return wanted


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How to search."""

    width: int
    """Beams that continue after each token, and sequences to return."""
    max_tokens: int
    """Tokens of the longest sequence."""
    prompt_len: int
    """Tokens of the prompt, which count for scores as in vLLM."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence; empty: only ``max_tokens`` does."""
    length_penalty: float = 1.0
    """A score is the sum of log probabilities, divided by the length to this power."""


@dataclass(frozen=True, slots=True)
class BeamCandidates(Generic[Row]):
    """What may follow one beam."""

    token_ids: Sequence[int]
    """The likeliest next tokens, best first: twice the width, so that enough of them do not end the sequence."""
    logprobs: Sequence[float]
    """Their log probabilities."""
    row: Row
    """What the caller keeps of this position."""


@dataclass(frozen=True, slots=True)
class Beam(Generic[Row]):
    """A sequence that begins after the prompt."""

    token_ids: Sequence[int] = ()
    """Includes the token that ended it."""
    cumulative_logprob: float = 0.0
    rows: Sequence[Row] = ()
    """[len(token_ids)] what the caller kept of each position."""
    score: float = 0.0
    end_token_id: int | None = None
    """The token that ended it; None: it is live, or ended with ``max_tokens``."""


class BeamSearch(Generic[Row]):
    """Searches the continuations of one prompt.

    As in vLLM, every end token among a beam's candidates completes a sequence, and the search continues to
    ``max_tokens``; it ends earlier when no live beam can still become one of the best, which changes no result.
    """

    def __init__(self, settings: BeamSettings) -> None:
        self._settings = settings
        self._completed: list[Beam[Row]] = []  # the best ``width``, best first
        self._num_steps = 0
        self.live: list[Beam[Row]] = [Beam()]
        """Beams to continue, best first; empty when the search has ended."""

    def advance(self, candidates: Sequence[BeamCandidates[Row]]) -> None:
        """Continue each of the live beams with what may follow it, in their order."""
        self._num_steps += 1
        ended: list[Beam[Row]] = []
        grown: list[tuple[float, Beam[Row], BeamCandidates[Row], int]] = []
        for beam, following in zip(self.live, candidates, strict=True):
            for token_id, logprob in zip(following.token_ids, following.logprobs, strict=True):
                total = beam.cumulative_logprob + logprob
                if token_id in self._settings.end_token_ids:
                    ended.append(self._extended(beam, token_id, total, following.row, ends=True))
                else:
                    grown.append((total, beam, following, token_id))
        # All have the same length, so the sum orders them as the score does. Equal ones keep the order of their beams.
        grown.sort(key=lambda item: item[0], reverse=True)
        self.live = [
            self._extended(beam, token_id, total, following.row, ends=False)
            for total, beam, following, token_id in grown[: self._settings.width]
        ]
        self._completed = self._best_of([*self._completed, *ended])
        if self._num_steps == self._settings.max_tokens:
            self._completed = self._best_of([*self._completed, *self.live])
            self.live = []
        # vLLM searches on to max_tokens. Ending here changes no result, and saves one round trip for each token.
        elif not self._can_improve():
            self.live = []

    def best(self) -> list[Beam[Row]]:
        """Return the sequences of a search that has ended, best first."""
        assert not self.live, "the search continues"
        return self._completed

    def _extended(self, beam: Beam[Row], token_id: int, total: float, row: Row, *, ends: bool) -> Beam[Row]:
        token_ids = [*beam.token_ids, token_id]
        length = len(token_ids) - ends  # the token that ends a sequence does not count
        score = self._score(total, length)
        return Beam(token_ids, total, [*beam.rows, row], score, token_id if ends else None)

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(self._settings.prompt_len + length, self._settings.length_penalty)

    def _best_of(self, beams: list[Beam[Row]]) -> list[Beam[Row]]:
        return sorted(beams, key=attrgetter("score"), reverse=True)[: self._settings.width]

    def _can_improve(self) -> bool:
        """Return whether a live beam may still become one of the best: its sum of log probabilities only falls, and is
        divided by the longest or the present length at best."""
        if len(self._completed) < self._settings.width:
            return bool(self.live)
        lengths = (self._num_steps, self._settings.max_tokens)
        worst = self._completed[-1].score
        return any(max(self._score(beam.cumulative_logprob, n) for n in lengths) > worst for beam in self.live)
