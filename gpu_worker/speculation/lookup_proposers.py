"""Proposers that look up what followed the latest tokens before, and need no model.

:class:`NgramProposer` proposes the tokens that followed when the latest ones last occurred, in the prompt or in the
output. :class:`SuffixProposer` proposes those that followed most often, in past answers of the request's tenant too
(Oliaro et al., "SuffixDecoding: Extreme speculative decoding for emerging AI applications"): for requests with the same
cache salt only. A draft that was right would otherwise tell by its time what another tenant was answered.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

from ..batch.input_batch import InputBatch, Ints, StepInputs
from .speculation import StepArrays

MOST_PAST_TOKENS = 1 << 20
"""Of all past answers together: at 28 bytes a token they take 28 MiB."""
_FEWEST_TOKENS = 64
"""An index takes at least the memory of so many tokens, 2 KiB: requests may each have a salt of their own."""
_KEYS = (6, 2)
"""An occurrence is found by so many of its last tokens: by more of them first, because these are right more often."""
_MOST_OCCURRENCES = 32
"""So many occurrences are compared for each key, from the latest one on."""
_MOST_LENGTHS = 4
"""Drafts are compared after so many different lengths of a match, the longest ones."""
_BASE = 0x9E3779B1
"""Of the hash of a position: the sum of its last tokens, each times one more power of it, modulo 2 to the 32."""
_END = -1
"""Stands behind an answer. No match goes across it, nor across the negative numbers that stand for embeddings."""


class Continuation(NamedTuple):
    """Holds what may follow."""

    score: float
    """The number of drafts that are right on average, if what follows is what followed before."""
    tokens: list[int]


_NOTHING = Continuation(0.0, [])


class TokenIndex:
    """Finds where the last tokens of a sequence occurred in this one, which grows at its end.

    Positions with the same hash of their last tokens are chained from the latest one on, as in LZ77. A token takes its
    own four bytes, four for each key, and at most twice as many for the heads of the chains.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.num_answers = 0
        self._make_chains(64)

    def _make_chains(self, size: int) -> None:
        self._mask = size - 1
        self._sums = [0] * len(_KEYS)
        self._heads = [array("i", [-1]) * size for _ in _KEYS]
        self._earlier = [array("i") for _ in _KEYS]

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens, of which negative ones match none."""
        start = len(self.tokens)
        self.tokens.extend(token_ids)
        if len(self.tokens) > self._mask:
            size = self._mask + 1
            while size <= len(self.tokens):
                size *= 2
            self._make_chains(size)
            start = 0
        for key, length in enumerate(_KEYS):
            self._chain(key, length, start)

    def _chain(self, key: int, length: int, start: int) -> None:
        """Append the positions from ``start`` on to the chains of one key."""
        tokens, heads, earlier, mask = self.tokens, self._heads[key], self._earlier[key], self._mask
        found, weight = self._sums[key], pow(_BASE, length, 1 << 32)
        for position in range(start, len(tokens)):
            found = found * _BASE + tokens[position]
            if position >= length:
                found -= tokens[position - length] * weight
            found &= 0xFFFFFFFF
            place = (found ^ found >> 15) & mask
            earlier.append(heads[place])
            heads[place] = position
        self._sums[key] = found

    def find(self, pattern: Sequence[int], count: int, config: SpeculativeConfig) -> Continuation:
        """Return at most ``count`` tokens that may follow ``pattern``, whose last tokens they followed here."""
        depth = config.suffix_decoding_max_tree_depth
        for length, heads, earlier in zip(_KEYS, self._heads, self._earlier, strict=True):
            if len(pattern) < length or length >= depth:
                continue
            matches: list[tuple[int, int]] = []
            position = heads[self._place(pattern[-length:])]
            for _ in range(_MOST_OCCURRENCES):
                if position < 0:
                    break
                if (matched := self._match(pattern, position, depth - 1)) >= length:
                    matches.append((matched, position + 1))
                position = earlier[position]
            if (found := self._best(matches, count, config)).tokens:
                return found
        return _NOTHING

    def _place(self, token_ids: Sequence[int]) -> int:
        """Return the chain of these last tokens of a position, as :meth:`_chain` finds it step by step."""
        found = 0
        for token_id in token_ids:
            found = (found * _BASE + token_id) & 0xFFFFFFFF
        return (found ^ found >> 15) & self._mask

    def _match(self, pattern: Sequence[int], position: int, most: int) -> int:
        """Return how many tokens up to ``position`` equal the last ones of ``pattern``, at most ``most``."""
        tokens, count = self.tokens, 0
        most = min(most, len(pattern), position + 1)
        while count < most and tokens[position - count] == pattern[-1 - count] >= 0:
            count += 1
        return count

    def _best(self, matches: list[tuple[int, int]], count: int, config: SpeculativeConfig) -> Continuation:
        """Return what follows best after the matches of the longest lengths. ``matches``: lengths and places behind."""
        best = _NOTHING
        for length in sorted({length for length, _ in matches}, reverse=True)[:_MOST_LENGTHS]:
            places = [place for matched, place in matches if matched >= length]
            found = self._follow(places, _most_drafts(length, count, config), config.suffix_decoding_min_token_prob)
            if found.score > best.score:
                best = found
        return best

    def _follow(self, places: list[int], count: int, least: float) -> Continuation:
        """Return the tokens from ``places`` on that most of these agree with, the latest where as many do. They end
        before a share of less than ``least``."""
        tokens, end = self.tokens, len(self.tokens)
        found, score, share = list[int](), 0.0, 1.0
        while len(found) < count:
            followers: dict[int, list[int]] = {}
            for place in places:
                if place < end and tokens[place] >= 0:
                    followers.setdefault(tokens[place], []).append(place + 1)
            if not followers:
                break
            token_id, agreeing = max(followers.items(), key=lambda each: len(each[1]))
            share *= len(agreeing) / len(places)
            if share < least:
                break
            found.append(token_id)
            score, places = score + share, agreeing
        return Continuation(score, found)


def _most_drafts(length: int, count: int, config: SpeculativeConfig) -> int:
    """Return how many of ``count`` drafts may follow a match of ``length`` tokens, of which fewer count where these and
    the drafts would be more than the depth."""
    depth, factor = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_spec_factor
    while count and int(min(length, depth - count) * factor + 1e-6) < count:
        count -= 1
    return count


class PastAnswers:
    """Keeps the latest answers by whose they are. Of one key the older half is dropped at once; keys that were not used
    for the longest time go first."""

    def __init__(self, most_answers: int, most_tokens: int = MOST_PAST_TOKENS) -> None:
        """``most_answers`` and ``most_tokens``: of all keys together."""
        self._most_answers, self._most_tokens = most_answers, most_tokens
        self._indexes: OrderedDict[tuple[str, bytes], deque[TokenIndex]] = OrderedDict()
        self.num_answers = 0
        self.num_tokens = 0

    def add(self, key: tuple[str, bytes], answer: Sequence[int]) -> None:
        """Keep an answer, or the last part of a long one."""
        answer = answer[-(self._most_tokens // 2 - 1) :] if self._most_answers else ()
        if not len(answer):
            return
        indexes = self._indexes.setdefault(key, deque())
        self._indexes.move_to_end(key)
        if not indexes or self._is_full(indexes[-1], len(answer)):
            indexes.append(TokenIndex())
        indexes[-1].append([*answer, _END])
        indexes[-1].num_answers += 1
        self.num_answers += 1
        self.num_tokens += len(answer) + 1
        most_keys = self._most_tokens // _FEWEST_TOKENS
        while (
            self.num_answers > self._most_answers
            or self.num_tokens > self._most_tokens
            or len(self._indexes) > most_keys
        ):
            self._drop_oldest()

    def of(self, key: tuple[str, bytes]) -> Sequence[TokenIndex]:
        """Return the answers that a request with ``key`` may look at."""
        if (indexes := self._indexes.get(key)) is None:
            return ()
        self._indexes.move_to_end(key)
        return indexes

    def _is_full(self, index: TokenIndex, num_more: int) -> bool:
        is_many = index.num_answers >= max(1, self._most_answers // 2)
        return is_many or len(index.tokens) + num_more + 1 > self._most_tokens // 2

    def _drop_oldest(self) -> None:
        key, indexes = next(iter(self._indexes.items()))
        oldest = indexes.popleft()
        self.num_answers -= oldest.num_answers
        self.num_tokens -= len(oldest.tokens)
        if not indexes:
            del self._indexes[key]


class _WithoutModel:
    """Has what :class:`~.speculation.Proposer` asks of drafts that a model makes."""

    def make_kv_caches(self) -> None:
        """Do nothing: no model drafts."""

    def drop_kv_caches(self) -> None:
        """Do nothing."""

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Do nothing."""


class SuffixProposer(_WithoutModel):
    """Fulfils :class:`~.speculation.Proposer`."""

    def __init__(self, batch: InputBatch, config: SpeculativeConfig) -> None:
        self._batch = batch
        self._config = config
        self._own: dict[str, TokenIndex] = {}
        self._keys: dict[str, tuple[str, bytes]] = {}
        self.past = PastAnswers(config.suffix_decoding_max_cached_requests)

    def update(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            # The batch has its row until it takes the step, too; it has none if it was preempted before.
            key, answer = self._keys.pop(req_id, None), self._batch.output_tokens(req_id)
            if key is not None and answer is not None:
                self.past.add(key, answer.tolist())
            self._own.pop(req_id, None)
        for req_id in step.preempted_req_ids:
            self._own.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            self._own.pop(new.req_id, None)
            self._keys[new.req_id] = (new.tenant, new.cache_salt)

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        proposed = {}
        for req_id, count in wanted.items():
            index = self._own.get(req_id)
            if index is None:
                index = self._own[req_id] = TokenIndex()
            known = self._batch.known_tokens(req_id)
            # Looked up before the last tokens are appended: they occur at the end, where nothing follows.
            pattern = known[-self._config.suffix_decoding_max_tree_depth :].tolist()
            index.append(known[len(index.tokens) : -1].tolist())
            found = index.find(pattern, count, self._config)
            for past in self.past.of(self._keys[req_id]):
                found = max(past.find(pattern, count, self._config), found, key=lambda each: each.score)
            if found.tokens:
                proposed[req_id] = found.tokens
        return proposed


class NgramProposer(_WithoutModel):
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
