"""A short form of ``python -m tests.soak.verified``."""

from pathlib import Path

from tests.soak.verified import run


async def test_changed_tokens_are_found_and_no_others(socket_dir: Path) -> None:
    course, is_good = await run(socket_dir, "hash", requests=30, rounds=2, seed=4)
    assert is_good, course
    assert course.different >= course.wrong > 0
    assert course.ended >= 1
    assert not course.false_alarms
    assert course.equal == course.requests - course.different
