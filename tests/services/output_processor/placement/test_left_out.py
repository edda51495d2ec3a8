"""Tests how long engines are left out, and how many."""

from tokenloom.services.output_processor.placement.last_snapshot import EngineKey
from tokenloom.services.output_processor.placement.left_out import LEFT_OUT_SECONDS, MAX_LEFT_OUT, LeftOut


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_returns_after_a_while_and_counts_from_its_last_refusal() -> None:
    clock = Clock()
    left_out, one, other = LeftOut(clock), EngineKey("a", 1), EngineKey("b", 1)
    left_out.add(one)
    clock.now = 1.0
    left_out.add(other)
    left_out.add(one)
    assert left_out.now() == {one, other}
    clock.now = 0.9 + LEFT_OUT_SECONDS
    assert left_out.now() == {one, other}
    clock.now = 1.0 + LEFT_OUT_SECONDS
    assert left_out.now() == set()
    assert not len(left_out)


def test_the_oldest_are_forgotten_first() -> None:
    left_out = LeftOut(Clock())
    keys = [EngineKey(str(number), 1) for number in range(MAX_LEFT_OUT + 1)]
    for key in keys:
        left_out.add(key)
    assert left_out.now() == set(keys[1:])
