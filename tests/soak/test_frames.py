from tests.soak.frames import check


def test_frames_arrive_or_are_refused() -> None:
    check(range(100))
