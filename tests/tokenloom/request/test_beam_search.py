"""The algorithm on made-up probabilities, against a search that is as plain as possible."""

import math
import random

import pytest

from tokenloom.request.beam_search import Beam, BeamCandidates, BeamSearch, BeamSettings, num_candidates
from tokenloom.request.errors import InvalidArgument

VOCAB = 12
END = 3


def logprobs_after(seed: int, token_ids: tuple[int, ...]) -> list[float]:
    """Return log probabilities of all tokens; those of the end token rise with the length."""
    chance = random.Random(f"{seed} {token_ids}")
    weights = [chance.random() ** 3 + 1e-3 for _ in range(VOCAB)]
    weights[END] *= 0.3 * len(token_ids)
    total = sum(weights)
    return [math.log(weight / total) if weight else -math.inf for weight in weights]


def best_after(seed: int, token_ids: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    values = logprobs_after(seed, token_ids)
    order = sorted(range(VOCAB), key=lambda token_id: -values[token_id])
    return [(token_id, values[token_id]) for token_id in order[:count]]


def run(settings: BeamSettings, seed: int) -> tuple[list[Beam[int]], int]:
    """Return the sequences, and how many steps were computed."""
    search: BeamSearch[int] = BeamSearch(settings)
    steps = 0
    while search.live:
        steps += 1
        following = []
        for beam in search.live:
            pairs = best_after(seed, tuple(beam.token_ids), 2 * settings.width)
            following.append(BeamCandidates([pair[0] for pair in pairs], [pair[1] for pair in pairs], steps))
        search.advance(following)
    return search.best(), steps


def plain(settings: BeamSettings, seed: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return vLLM's result: every sequence is scored at the end, and the search never ends early."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(settings.max_tokens):
        grown = []
        for total, tokens in live:
            for token_id, value in best_after(seed, tokens, 2 * settings.width):
                target = done if token_id in settings.end_token_ids else grown
                target.append((total + value, (*tokens, token_id)))
        live = sorted(grown, key=lambda each: -each[0])[: settings.width]
    scored = []
    for total, tokens in [*done, *live]:
        length = settings.prompt_len + len(tokens) - (tokens[-1] in settings.end_token_ids)
        scored.append((total / length**settings.length_penalty, tokens))
    return sorted(scored, key=lambda each: -each[0])[: settings.width]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("prompt_len", [1, 40])
def test_the_same_sequences_and_scores_as_a_plain_search(length_penalty: float, width: int, prompt_len: int) -> None:
    ended = 0
    for seed in range(20):
        settings = BeamSettings(width, 8, prompt_len, frozenset({END}), length_penalty)
        beams, _ = run(settings, seed)
        expected = plain(settings, seed)
        assert [tuple(beam.token_ids) for beam in beams] == [tokens for _, tokens in expected]
        assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected])
        for beam in beams:
            assert beam.end_token_id == (END if beam.token_ids[-1] == END else None)
            assert beam.rows == [*range(1, len(beam.token_ids) + 1)]
            values = [logprobs_after(seed, tuple(beam.token_ids[:i]))[t] for i, t in enumerate(beam.token_ids)]
            assert beam.cumulative_logprob == pytest.approx(sum(values))
        ended += any(beam.end_token_id is not None for beam in beams)
    assert ended or length_penalty == 3.0, "a penalty that prefers long sequences, which end with max_tokens"


def test_the_search_ends_when_no_beam_can_improve() -> None:
    settings = BeamSettings(2, 50, 10, frozenset({END}), 0.0)
    beams, steps = run(settings, 0)
    assert all(beam.end_token_id == END for beam in beams)
    assert steps < 20
    without_end, steps = run(BeamSettings(2, 50, 10), 0)
    assert steps == 50
    assert {len(beam.token_ids) for beam in without_end} == {50}


def test_a_search_may_run_out_of_beams() -> None:
    search: BeamSearch[None] = BeamSearch(BeamSettings(2, 9, 1, frozenset({1, 2, 3, 4})))
    search.advance([BeamCandidates([4, 2, 3, 1], [-1.0, -2.0, -3.0, -4.0], None)])
    assert search.live == []
    assert [beam.token_ids for beam in search.best()] == [[4], [2]]


def test_beams_of_equal_probability_keep_their_order() -> None:
    search: BeamSearch[None] = BeamSearch(BeamSettings(2, 2, 1))
    search.advance([BeamCandidates([7, 8, 9], [-1.0, -1.0, -1.0], None)])
    search.advance([BeamCandidates([1, 2], [-1.0, -1.0], None)] * 2)
    assert [beam.token_ids for beam in search.best()] == [[7, 1], [7, 2]]


def test_as_many_candidates_as_the_engine_returns() -> None:
    assert num_candidates(10, vocab_size=100, max_logprobs=20, field="n") == 20
    assert num_candidates(60, vocab_size=100, max_logprobs=100, field="n") == 100
    with pytest.raises(InvalidArgument, match=r"n is 11: .* 22 log probabilities .* so n may be at most 10"):
        num_candidates(11, vocab_size=100, max_logprobs=20, field="n")
    with pytest.raises(InvalidArgument, match="only 9 tokens"):
        num_candidates(10, vocab_size=9, max_logprobs=20, field="n")
