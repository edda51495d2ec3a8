"""Tests how long engines are left out, and how many."""

from tokenloom.services.output_processor.placement.last_snapshot import EngineKey
from tokenloom.services.output_processor.placement.placement import LEFT_OUT_SECONDS, MAX_LEFT_OUT, EngineCooldown


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_returns_after_a_while_and_counts_from_its_last_refusal() -> None:
    clock = Clock()
    cooldown, one, other = EngineCooldown(clock), EngineKey("a", 1), EngineKey("b", 1)
    cooldown.add(one)
    clock.now = 1.0
    cooldown.add(other)
    cooldown.add(one)
    assert cooldown.now() == {one, other}
    clock.now = 0.9 + LEFT_OUT_SECONDS
    assert cooldown.now() == {one, other}
    clock.now = 1.0 + LEFT_OUT_SECONDS
    assert cooldown.now() == set()
    assert not len(cooldown)


def test_the_oldest_are_forgotten_first() -> None:
    cooldown = EngineCooldown(Clock())
    keys = [EngineKey(str(number), 1) for number in range(MAX_LEFT_OUT + 1)]
    for key in keys:
        cooldown.add(key)
    assert cooldown.now() == set(keys[1:])
