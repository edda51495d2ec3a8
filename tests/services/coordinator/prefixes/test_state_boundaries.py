"""Of a prompt an engine whose layers keep a state has what lies before the last boundary that it shares."""

import numpy as np

from tokenloom.services.coordinator.prefixes.state_boundaries import StateBoundaries

HASHES = list(range(1, 140))


def counts(states: StateBoundaries, hashes: list[int]) -> list[int]:
    found = np.full(3, 99)
    states.put_into(found, hashes)
    return found.tolist()


def test_a_prompt_that_was_placed_ends_with_a_boundary() -> None:
    states = StateBoundaries()
    states.open(1, 5, 64)
    states.picked(1, HASHES[:10], 163, 16)
    assert counts(states, HASHES) == [99, 8, 99], "128 tokens of 163, for the engine that keeps states"
    assert counts(states, [*HASHES[:7], 77]) == [99, 0, 99], "it parts before the boundary"
    states.picked(1, HASHES[:3], 63, 16)
    assert counts(states, HASHES[:7]) == [99, 0, 99], "shorter than a chunk"


def test_the_last_named_block_before_a_boundary_stands_for_it() -> None:
    """Of blocks 128 to 160 every second one is named."""
    states = StateBoundaries()
    states.open(1, 5, 16)
    states.picked(1, HASHES, 135 * 16 + 2, 16)
    assert counts(states, HASHES)[1] == 134


def test_as_many_boundaries_as_slots_are_remembered() -> None:
    states = StateBoundaries()
    states.open(1, 2, 64)
    states.store(1, [1, 2])
    states.store(1, [1, 3])
    assert [counts(states, [each])[1] for each in (1, 2, 3)] == [1, 0, 1]
    states.open(1, 2, 64)
    assert counts(states, [1])[1] == 0, "another incarnation"
    states.open(1, 0, 0)
    assert not states
    states.store(1, [1])
    states.picked(1, [1], 99, 16)
    assert counts(states, [1]) == [99, 99, 99]
