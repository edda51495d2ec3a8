"""The index finds what a search through the whole sequence finds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput
from tokenloom.gpu_worker.speculation.lookup_proposers import NgramProposer, SuffixIndex


def search(tokens, shortest, longest, count):
    """The slow way."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                found = list(tokens)
                for place in range(end, end + count):
                    found.append(found[place])
                return found[len(tokens) :]
    return []


SEQUENCES = st.lists(st.integers(0, 3), max_size=40)
LENGTHS = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


@given(st.lists(SEQUENCES, max_size=4), LENGTHS, st.integers(1, 8))
def test_it_proposes_what_a_search_finds(parts, lengths, count):
    index, tokens = SuffixIndex(*lengths), []
    for part in parts:
        index.extend(part)
        tokens += part
        assert index.propose(count) == search(tokens, *lengths, count)
        assert len(index) == len(tokens)


def test_the_longest_match_wins_and_among_equals_the_latest():
    index = SuffixIndex(1, 3)
    index.extend([1, 2, 3, 9, 2, 3, 8, 7, 3, 6, 1, 2, 3])
    assert index.propose(2) == [9, 2]
    index.extend([4, 3])
    assert index.propose(2) == [4, 3]


def test_a_cycle_is_continued_beyond_its_end():
    index = SuffixIndex(1, 2)
    index.extend([5, 6, 5, 6])
    assert index.propose(5) == [5, 6, 5, 6, 5]


def test_an_embedding_is_not_proposed_and_follows_only_itself():
    """A batch marks embeddings by negative numbers of their own."""
    index = SuffixIndex(1, 2)
    index.extend([-1, -2, 5, 6, -5, -6, 5])
    assert index.propose(3) == [6]
    index.extend([6])
    assert index.propose(3) == []
    index.extend([-9])
    assert index.propose(3) == []


def test_a_token_costs_the_same_however_long_the_sequence_is():
    """The entries of the index grow by the number of lengths for each token."""
    index = SuffixIndex(2, 5)
    sizes = []
    for start in range(0, 4000, 500):
        index.extend(range(start, start + 500))
        sizes.append(len(index._follower))
    assert set(np.diff(sizes).tolist()) == {2000}


class Tokens:
    """The part of the input batch that the proposer reads."""

    def __init__(self, **tokens):
        self.tokens = tokens

    def known_tokens(self, req_id):
        return np.array(self.tokens[req_id])


def update(proposer, finished=(), preempted=()):
    cached = CachedRequestData([], [], [], {})
    proposer.update(SchedulerOutput([], cached, {}, 0, list(finished), list(preempted)))


def test_requests_are_followed_until_they_end():
    batch = Tokens(a=[1, 2, 3, 1, 2], b=[4, 5, 6, 7])
    proposer = NgramProposer(batch, 2, 3)
    assert proposer.propose(None, None, {"a": 2, "b": 2}) == {"a": [3, 1]}
    batch.tokens = {"a": [1, 2, 3, 1, 2, 3, 9], "b": [4, 5, 6, 7, 4, 5]}
    assert proposer.propose(None, None, {"b": 1}) == {"b": [6]}
    assert proposer.propose(None, None, {"a": 3}) == {}
    update(proposer, finished=["a"], preempted=["b"])
    assert not proposer._indexes
    batch.tokens = {"a": [8, 8, 8]}
    assert proposer.propose(None, None, {"a": 2}) == {"a": [8, 8]}
