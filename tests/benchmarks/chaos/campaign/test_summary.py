"""What became of the requests, by kind of fault, and the limits of a campaign."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as changed

from benchmarks.chaos.campaign.options import CAMPAIGNS, ChaosOptions
from benchmarks.chaos.campaign.summary import NO_FAULT, added_ttft, rows_of, violations
from benchmarks.chaos.clients.answer import Answer
from benchmarks.chaos.clients.record import Record, Reference
from benchmarks.chaos.faults.fault import WHOLE, Action, Fault, Injection

KINDS = {kind.name: kind for kind in WHOLE}
REFERENCE = Reference(Answer(), latency=1.0, longest_pause=0.1)
RECORD = Record(
    number=1,
    case="greedy",
    client="plain HTTP",
    resumes=False,
    moves=False,
    gateway=0,
    streamed=True,
    sent=10.0,
    ended=12.0,
    seconds=60.0,
    ttft=0.2,
    pause=0.5,
    reference=REFERENCE,
    failure=None,
    is_typed=False,
    detail="",
    is_wrong=False,
    refused=0,
    resumed=0,
)
CUT = replace(RECORD, failure="cut")


def injection(kind: str = "engine", began: float = 11.0, part: str = "", **changes: Any) -> Injection:
    fault = Fault(changes.pop("action", Action.KILL), KINDS[kind], changes.pop("seconds", 0.0), 0.0)
    fields: dict[str, Any] = {"ended": began, "effect": "seen", "served_again": 3.0, **changes}
    return Injection(fault, part or f"{kind}-0", 1, began, **fields)


def row(records: list[Record], injections: list[Injection], kind: str = "all") -> dict[str, Any]:
    return next(row.report() for row in rows_of(records, injections) if row.kind == kind)


def test_requests_are_counted_under_the_last_fault_they_met() -> None:
    injections = [injection("tokenizer", 10.5), injection("engine", 11.0), injection("worker", 13.0)]
    rows = {each.kind: each.requests for each in rows_of([RECORD], injections)}
    assert rows == {"kill engine": 1, "kill tokenizer": 0, "kill worker": 0, NO_FAULT: 0, "all": 1}


def test_a_fault_lasts_until_its_part_serves_again() -> None:
    early = [injection("engine", 8.0, served_again=3.0)]
    assert row([RECORD], early, "kill engine")["requests"] == 1
    assert row([RECORD], [injection("engine", 8.0, served_again=1.0)], NO_FAULT)["requests"] == 1


def test_added_latency_and_pause() -> None:
    found = row([RECORD, replace(RECORD, ended=15.0, pause=4.1)], [])
    assert found["added_s"] == {"p50": 2.5, "p99": 3.97, "max": 4.0}
    assert found["added_pause_s"]["max"] == 4.0
    unary = replace(RECORD, streamed=False, pause=2.0)
    assert row([unary], [])["added_pause_s"]["max"] == 1.0


def test_a_plain_client_is_lost_with_its_gateway() -> None:
    injections = [injection("gateway", 12.0)]
    found = row([CUT], injections)
    assert (found["failed"], found["lost_with_their_gateway"], found["streams_cut"]) == (0, 1, 0)
    for record in (replace(CUT, gateway=1), replace(CUT, resumes=True)):
        assert row([record], injections)["failed"] == 1
    assert row([CUT], [injection("gateway", 12.0, action=Action.TERM)])["failed"] == 1


def test_what_a_held_connection_has_saved_is_counted() -> None:
    killed = [injection("gateway", 11.0)]
    assert row([RECORD], killed)["outlived_their_gateway"] == 1
    others = (replace(RECORD, gateway=1), replace(RECORD, moves=True), replace(RECORD, sent=11.5), CUT)
    assert row(list(others), killed)["outlived_their_gateway"] == 0
    assert row([RECORD], [injection("gateway", 11.0, action=Action.TERM)])["outlived_their_gateway"] == 0


def test_a_client_that_calls_one_gateway_waits_for_it() -> None:
    frozen = [injection("gateway", 11.0, action=Action.FREEZE, seconds=10.0, ended=21.0, served_again=None)]
    waited = replace(RECORD, resumes=True, ended=22.0, pause=10.0)
    assert row([waited], frozen)["added_pause_s"]["max"] is None
    assert row([replace(waited, moves=True)], frozen)["added_pause_s"]["max"] == 9.9


def test_a_refused_connection_is_never_excused() -> None:
    found = row([replace(CUT, failure="refused", refused=1)], [injection("gateway", 12.0)])
    assert (found["failed"], found["refused_connections"], found["lost_with_their_gateway"]) == (1, 1, 0)


def test_requests_expire_while_no_engine_is_there() -> None:
    outage = injection("engine", 11.0, "all engines", served_again=14.0)
    expired = replace(CUT, failure="DeadlineExceeded", is_typed=True, ended=14.0, seconds=4.0)
    assert row([expired], [outage])["expired"] == 1
    assert row([replace(expired, ended=16.0)], [outage])["failed"] == 1, "too late"
    assert row([replace(expired, ended=12.5)], [outage])["failed"] == 1, "too early"
    assert row([expired], [])["failed"] == 1, "no outage"
    assert row([replace(expired, failure="Unavailable", ended=13.7)], [outage])["expired"] == 1
    assert row([expired], [replace(outage, served_again=1.0)])["failed"] == 1, "engines returned early enough"
    assert row([expired], [replace(outage, served_again=2.5)])["expired"] == 1, "engines returned too late"


@pytest.mark.parametrize(
    ("records", "injections", "limits", "words"),
    [
        ([CUT], [], {}, "streams cut without an error event: 1; the limit is 0"),
        ([CUT], [], {"max_failed": 0, "max_cut": None}, "failed requests: 1; the limit is 0"),
        ([CUT], [], {"min_success": 0.9, "max_cut": None}, "share of successful requests: 0.00000"),
        ([replace(RECORD, is_wrong=True)], [], {}, "wrong answers: 1; the limit is 0"),
        ([replace(RECORD, refused=2)], [], {"max_refused": 0}, "refused connections: 2; the limit is 0"),
        ([RECORD], [], {"max_added_p99": 0.5}, "p99 of the added latency in s: 1; the limit is 0.5"),
        ([RECORD], [], {"max_pause": 0.3}, "longest added pause in s: 0.4; the limit is 0.3"),
        ([RECORD], [injection(effect="")], {}, "faults without effect: 1; the limit is 0"),
        ([RECORD], [injection(served_again=None)], {}, "parts that did not serve again: 1; the limit is 0"),
        ([RECORD], [], {"requests": 2}, "requests: 1; at least 2"),
        ([], [], {"max_added_p99": 1.0, "requests": 1}, "p99 of the added latency in s: nan"),
    ],
)
def test_violated_limits(
    records: list[Record], injections: list[Injection], limits: dict[str, Any], words: str
) -> None:
    found = violations(changed(ChaosOptions(requests=1), **limits), records, injections)
    assert any(text.startswith(words) for text in found), found


def test_a_campaign_within_its_limits() -> None:
    for campaign in CAMPAIGNS.values():
        options = changed(campaign.options, requests=1, max_added_ttft_p99=None)
        assert violations(options, [RECORD], [injection()]) == []


def test_the_first_two_seconds_of_a_fault_do_not_count_for_the_ttft() -> None:
    frozen = injection("coordinator", 20.0, action=Action.FREEZE, ended=30.0, served_again=None)
    records = [
        RECORD,
        replace(RECORD, sent=21.0, ended=23.0, ttft=1.0),
        replace(RECORD, sent=25.0, ended=27.0, ttft=0.23),
    ]
    assert added_ttft(records, [frozen]) == pytest.approx(0.03)
