"""A short form of ``python -m tests.soak.overlapping_drafts``."""

from collections import Counter

from tests.soak.overlapping_drafts import run_pair


def test_tokens_are_those_of_a_plain_engine() -> None:
    seen = Counter[str]()
    for seed in range(4):
        seen += run_pair(seed, 16)
    assert seen["answered"] + seen["aborted"] == 64
    assert min(seen["aborted"], seen["preempted"], seen["with a grammar"], seen["blocks moved"]) > 5
    assert 100 < seen["right drafts"] < seen["drafts"]
