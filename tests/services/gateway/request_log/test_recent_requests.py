"""The last requests are kept in a ring."""

from tests.services.gateway.request_log.finished import finished
from tokenloom.services.gateway.request_log.finished_request import MAX_RECENT, RecentRequests


def test_the_newest_come_first_and_the_oldest_leave() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT + 5):
        recent.add(finished(request_id=str(number)))
    assert [each.request_id for each in recent] == [str(number) for number in reversed(range(5, MAX_RECENT + 5))]
    assert len(recent) == MAX_RECENT
