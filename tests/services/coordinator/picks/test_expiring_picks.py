"""Picks expire in the order of their numbers."""

from tokenloom.services.coordinator.picks.placed import ExpiringPicks


def test_picks_expire_once_and_in_order() -> None:
    picks = ExpiringPicks()
    for expires_at, row in ((2.0, 7), (2.0, 3), (2.5, 7)):
        picks.add(expires_at, row)
    assert list(picks.expire(1.9)) == []
    assert list(picks.expire(2.0)) == [(1, 7), (2, 3)]
    picks.add(4.0, 5)
    assert list(picks.expire(9.0)) == [(3, 7), (4, 5)]
    assert list(picks.expire(9.0)) == []
