from pathlib import Path

from tokenloom.services.coordinator.service import AHEAD_MILLISECONDS, RisingClock


def test_numbers_do_not_fall_with_the_clock(tmp_path: Path) -> None:
    """A process that was cut off has a number that a coordinator without it does not know."""
    path, now = tmp_path / "c.numbers", 5_000_000
    before = RisingClock(lambda: now, path)
    given = before()
    now -= 4_000_000  # set back, and the coordinator is killed
    after = RisingClock(lambda: now, path)
    assert after() > given
    assert after() == after(), "no further ahead with each number"
    now += 2 * AHEAD_MILLISECONDS
    assert RisingClock(lambda: now, path)() >= after() == max(now, given + AHEAD_MILLISECONDS)
    path.write_text("torn")
    assert RisingClock(lambda: now, path)() == now
    assert RisingClock(lambda: now, None)() == now
