"""The order of a scheduler of a plugin."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle
from tests.engine_core.planned_steps import make_scheduler, step
from tests.plugin_packages import EXAMPLE_NAME, install_example
from tokenloom.engine_core.scheduling.request_order import QueuedRequest, Rank, RequestOrder, make_order
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.process.fall_backs import OF_PROCESS


@pytest.fixture(autouse=True)
def no_fall_back() -> Iterator[None]:
    yield
    OF_PROCESS.end("failed_plugin")


def scheduler_of(rank: Rank, **options: object) -> Scheduler:
    scheduler = make_scheduler(policy="priority", **options)
    scheduler._order = RequestOrder("acme:rank", rank)
    return scheduler


def ended(scheduler: Scheduler) -> list[str]:
    order = []
    while scheduler.has_work():
        order += [output.request_id for output in step(scheduler)[1] if output.finish_reason is not None]
    check_idle(scheduler)
    return order


def test_the_lowest_rank_begins_first_and_among_equals_the_earliest() -> None:
    scheduler = scheduler_of(lambda request: request.num_prompt_tokens, max_num_seqs=1)
    for request_id, length in (("long", 9), ("short", 2), ("middle", 5), ("short too", 2)):
        scheduler.add_request(make_request(request_id, [1] * length, 1))
    assert ended(scheduler) == ["short", "short too", "middle", "long"]


def test_the_highest_rank_is_preempted_first() -> None:
    scheduler = scheduler_of(lambda request: len(request.tenant), num_blocks=6, watermark=0.0)
    for request_id in ("a", "bbb", "cc"):
        scheduler.add_request(make_request(request_id, [ord(request_id[0])] * 4, 12, tenant=request_id))
    preempted: list[str] = []
    while scheduler.has_work():
        preempted += step(scheduler)[0].preempted_req_ids
    assert preempted[0] == "bbb"
    assert "a" not in preempted
    check_idle(scheduler)


def test_a_record_says_what_a_request_is() -> None:
    records: list[QueuedRequest] = []

    def rank(request: QueuedRequest) -> int:
        records.append(request)
        return 0

    scheduler = scheduler_of(rank)
    scheduler.add_request(make_request("r", [1, 2, 3], 7, accepted=[4], priority=-3, tenant="t"))
    (record,) = records
    assert record[:5] == ("t", -3, 3, 1, 7)
    assert record.arrival_ns > 0
    assert record[6:] == (0, False, False)
    ended(scheduler)
    assert len(records) == 1, "a request is ranked once"


@pytest.mark.parametrize("value", ["1", 1.0, None, 2**63, True])
def test_a_failure_leaves_the_requests_own_priority(value: object) -> None:
    def rank(request: QueuedRequest) -> int:
        if request.num_prompt_tokens == 2:
            raise RuntimeError("two")
        return value  # type: ignore[return-value]

    scheduler = scheduler_of(rank, max_num_seqs=1)
    for request_id, prompt, priority in (("low", [1], 2), ("high", [1, 2], -1), ("middle", [1], 0)):
        scheduler.add_request(make_request(request_id, prompt, 1, priority=priority))
    assert ended(scheduler) == ["high", "middle", "low"]
    assert OF_PROCESS.of("")["failed_plugin"].startswith("acme:rank: ")


def test_the_policy_names_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    order = make_order(f"{EXAMPLE_NAME}:shortest_first", (EXAMPLE_NAME,))
    assert order.by_priority
    with pytest.raises(ValueError, match="policy 'lifo' is unknown; use one of fcfs, priority, or a plugin"):
        make_order("lifo")
    with pytest.raises(ValueError, match="name its package too"):
        make_order(f"{EXAMPLE_NAME}:shortest_first")
