"""The index finds what a search through the whole sequence finds, and no tenant sees another one's answers."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu_worker.speculation.steps import DEMO_MODEL
from tests.parity.engine import Engine
from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.gpu_worker.speculation.lookup_proposers import PastAnswers, TokenIndex


def config(**entries: Any) -> SpeculativeConfig:
    return SpeculativeConfig("suffix", 8, **entries)


def search(tokens: list[int], pattern: list[int], count: int, settings: SpeculativeConfig) -> tuple[float, list[int]]:
    """The slow way."""
    depth, factor = settings.suffix_decoding_max_tree_depth, settings.suffix_decoding_max_spec_factor
    matches = []
    for end in range(len(tokens), 0, -1):
        length = 0
        while length < min(depth - 1, end, len(pattern)) and tokens[end - 1 - length] == pattern[-1 - length] >= 0:
            length += 1
        matches.append((length, end))
    for shortest in (6, 2):
        best: tuple[float, list[int]] = (0.0, [])
        lengths = sorted({length for length, _ in matches if length >= shortest}, reverse=True)[:4]
        for length in lengths if shortest < depth else ():
            places = [end for matched, end in matches if matched >= length]
            most = max(n for n in range(count + 1) if n <= int(min(length, depth - n) * factor + 1e-6))
            found, share, score = list[int](), 1.0, 0.0
            while len(found) < most:
                next_tokens = [tokens[place] for place in places if place < len(tokens) and tokens[place] >= 0]
                if not next_tokens:
                    break
                (token, agreeing), *_ = Counter(next_tokens).most_common(1)
                share *= agreeing / len(places)
                if share < settings.suffix_decoding_min_token_prob:
                    break
                found, score = [*found, token], score + share
                places = [p + 1 for p in places if p < len(tokens) and tokens[p] == token]
            if score > best[0]:
                best = (score, found)
        if best[1]:
            return best
    return 0.0, []


TOKENS = st.lists(st.integers(-1, 2), max_size=30)


@given(
    st.lists(TOKENS, max_size=3),
    TOKENS,
    st.integers(0, 8),
    st.builds(
        config,
        suffix_decoding_max_tree_depth=st.integers(2, 24),
        suffix_decoding_max_spec_factor=st.sampled_from([0.4, 1.0, 3.0]),
        suffix_decoding_min_token_prob=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ),
)
def test_it_proposes_what_a_search_finds(
    parts: list[list[int]], pattern: list[int], count: int, settings: SpeculativeConfig
) -> None:
    index, tokens = TokenIndex(), list[int]()
    for part in parts:
        index.append(part)
        tokens += part
        expected = search(tokens[-_FEW:], pattern, count, settings)
        found = index.find(pattern, count, settings)
        if len(tokens) <= _FEW:
            assert (pytest.approx(found.score), found.tokens) == expected
        assert len(found.tokens) <= count


_FEW = 32
"""So many positions are compared whatever they hold."""


def test_the_most_frequent_follower_wins_and_an_answer_ends_where_it_ends() -> None:
    index = TokenIndex()
    index.append([1, 2, 3, 4, -1, 1, 2, 5, 6, -1, 1, 2, 5, 7, -1])
    found = index.find([9, 1, 2], 4, config(suffix_decoding_max_spec_factor=4.0))
    assert found.tokens == [5, 7]
    assert found.score == pytest.approx(2 / 3 + 1 / 3)
    assert index.find([9, 1, 2], 4, config(suffix_decoding_max_spec_factor=4.0, suffix_decoding_min_token_prob=0.5))[
        1
    ] == [5]


def test_a_long_sequence_is_found_after_its_index_has_grown() -> None:
    index = TokenIndex()
    for start in range(0, 30_000, 1000):
        index.append(range(start, start + 1000))
    assert index.find(range(17_000, 17_024), 8, config()).tokens == list(range(17_024, 17_032))


def test_past_answers_are_bounded_and_apart() -> None:
    past = PastAnswers(most_answers=6, most_tokens=100)
    for number in range(40):
        past.add((f"tenant {number % 5}", b""), list(range(number, number + 9)))
        assert past.num_answers <= 6
        assert past.num_tokens <= 100
        kept = [index for tenant in range(5) for index in past.of((f"tenant {tenant}", b""))]
        assert sum(len(index.tokens) for index in kept) == past.num_tokens
    assert past.of(("tenant 4", b""))
    assert not past.of(("tenant 4", b"salt"))
    past.add(("tenant 4", b""), list(range(1000)))
    assert past.num_tokens <= 100
    assert past.of(("tenant 4", b""))[-1].tokens[-2] == 999
    salted = PastAnswers(most_answers=10_000, most_tokens=640)
    for number in range(300):
        salted.add(("", b"%d" % number), [1])
    assert salted.num_answers == 10, "each has an index, which takes memory however few tokens it has"
    off = PastAnswers(most_answers=0)
    off.add(("", b""), [1, 2, 3])
    assert not off.of(("", b""))


def accepted(engine: Engine, tenant: str, salt: bytes = b"") -> tuple[list[int], int]:
    """Return an answer, and how many of its tokens were drafts."""
    drafts = engine.core.scheduler.drafts
    assert drafts is not None
    drafts.free_rows = drafts.costs = None  # also on a busy machine
    before, tokens = drafts.stats().num_accepted_tokens, list[int]()
    params = CoreSamplingParams(max_tokens=40, temperature=0.9, seed=3)
    engine.core.add_request(EngineCoreRequest("a", list(range(40, 60)), params, tenant=tenant, cache_salt=salt))
    while engine.core.has_work():
        for output in engine.core.step().outputs:
            tokens += output.new_token_ids
    return tokens, drafts.stats().num_accepted_tokens - before


def test_only_the_same_tenant_with_the_same_salt_looks_at_past_answers() -> None:
    engine = Engine(DEMO_MODEL, num_blocks=40, prefix_caching=True, speculative=config())
    tokens, cold = accepted(engine, "a")
    for tenant, salt in (("b", b""), ("", b""), ("a", b"salt")):
        assert accepted(engine, tenant, salt) == (tokens, cold)
    for tenant, salt in (("a", b""), ("a", b"salt"), ("b", b"")):
        again, warm = accepted(engine, tenant, salt)
        assert again == tokens
        assert warm > max(20, 2 * cold)


def test_no_past_answer_is_kept_where_none_may_be() -> None:
    engine = Engine(DEMO_MODEL, num_blocks=40, speculative=config(suffix_decoding_max_cached_requests=0))
    assert accepted(engine, "a") == accepted(engine, "a")
