"""A short form of ``python -m tests.soak.flips``."""

from tests.soak.flips import run


def test_flips_are_found_and_nothing_else() -> None:
    courses = list(run(flips=2, requests=8, seconds=0.1, seed=3, kinds=("int4",)))
    assert [(course.is_busy, course.flips, course.found, course.alarms) for course in courses] == [
        (False, 2, 2, 0),
        (True, 2, 2, 0),
    ]
    assert courses[1].requests == 8
