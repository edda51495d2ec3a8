"""A short form of ``python -m tests.soak.kv_flips``."""

import random

from tests.soak.kv_flips import Wire, run


def test_no_flipped_bit_is_used() -> None:
    courses = list(run(flips=8, transfers=4, seed=5))
    assert [course.road for course in courses] == [
        *("TCP", "TCP with TLS", "offload file", "shared folder", "LMCache server"),
    ]
    assert [str(course) for course in courses if not course.is_good] == []
    assert [(course.flips, course.transfers) for course in courses] == [(8, 4)] * 5
    assert courses[1].read_again, "TLS ends the connection"


def test_without_checksums_a_flipped_bit_makes_a_wrong_answer() -> None:
    wire = Wire("TCP", checksum=False)
    try:
        assert wire.is_right(random.Random(1), flips=False)
        assert not wire.is_right(random.Random(2), flips=True)
        assert wire.signs == (0, 0)
    finally:
        wire.close()
