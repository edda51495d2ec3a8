"""The maximum of a window of time."""

from tokenloom.planner.peak import Peak


def test_the_maximum_is_known_after_a_whole_window_and_forgotten_after_another() -> None:
    peak = Peak(60)
    assert peak.get(0.0) == float("inf")
    values = {0: 3.0, 20: 5.0, 40: 2.0, 60: 1.0, 80: 1.0}
    seen = {}
    for now, value in values.items():
        peak.add(now, value)
        seen[now] = peak.get(now)
    assert seen == {0: float("inf"), 20: float("inf"), 40: float("inf"), 60: 5.0, 80: 5.0}
    peak.add(100, 1.5)
    assert peak.get(100) == 2.0
