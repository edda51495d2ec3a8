import pytest

from tokenloom.services.gateway.generation.admission import LOG_SECONDS, RefusalLog


def test_refusals_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    refusals = RefusalLog(lambda: now)
    for _ in range(1000):
        refusals.add("no room")
    now += LOG_SECONDS
    refusals.add("still no room")
    assert [record.getMessage() for record in caplog.records] == [
        "requests refused since the last such line: 1; no room",
        "requests refused since the last such line: 1000; still no room",
    ]
