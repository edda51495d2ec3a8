"""The access log has one line for each request, and few lines for many refusals."""

import logging

import pytest

from tests.services.gateway.request_log.finished import finished
from tokenloom.services.gateway.request_log.access_log import MAX_REFUSALS, AccessLog
from tokenloom.services.runtime.telemetry.logs import HumanFormatter

NAME = "tokenloom.services.gateway.request_log.access_log"


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    formatter = HumanFormatter("gateway-0")
    return [formatter.format(record).partition("access_log ")[2] for record in caplog.records]


def test_a_line_has_what_the_request_has(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=NAME)
    log = AccessLog(lambda: 0.0)
    log.add(
        finished(model="a model", generation_id="g", prompt_tokens=3, output_tokens=2, ttft_seconds=0.125, key="ab")
    )
    log.add(finished(status=400, reason="INVALID_ARGUMENT"))
    assert written(caplog) == [
        '[r1] /v1/completions 200 seconds=0.25 key=ab model="a model" prompt_tokens=3 cached_tokens=0 output_tokens=2'
        " generation_id=g ttft_seconds=0.125",
        "[r1] /v1/completions 400 seconds=0.25 reason=INVALID_ARGUMENT",
    ]


def test_refusals_under_overload_are_counted_instead_of_written(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=NAME)
    now = [0.0]
    log = AccessLog(lambda: now[0])
    for _ in range(MAX_REFUSALS + 7):
        log.add(finished(status=503, reason="RESOURCE_EXHAUSTED"))
    assert len(written(caplog)) == MAX_REFUSALS
    log.add(finished())
    assert written(caplog)[-1].endswith(" 200 seconds=0.25 refusals_left_out=7")
    now[0] = 1.0
    log.add(finished(status=429, reason="RATE_LIMIT_EXCEEDED"))
    assert written(caplog)[-1].endswith(" 429 seconds=0.25 reason=RATE_LIMIT_EXCEEDED")


def test_a_higher_log_level_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=NAME)
    AccessLog(lambda: 0.0).add(finished())
    assert caplog.records == []
