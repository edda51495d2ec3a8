"""How long a request would wait, and which requests are admitted."""

import random

import pytest

from tokenloom.request.errors import ResourceExhausted
from tokenloom.services.gateway.generation.admission import POOLED_AT_ONCE, WaitEstimator, estimate_prompt_tokens
from tokenloom.services.gateway.mesh.mesh_view import Capacity
from tokenloom.services.gateway.records.generate_request import Chat, EmbeddedPrompt, GenerateRequest
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1 import types_pb2

HOUR = 3600.0


def estimator(max_seconds: float = 10.0, **capacity: float) -> WaitEstimator:
    estimator = WaitEstimator(max_seconds, random.Random(0), always_queued=0)
    estimator.observe(Capacity(**capacity))  # type: ignore[arg-type]
    return estimator


def is_admitted(estimator: WaitEstimator, priority: int = 0, timeout: float = HOUR, queue_share: float = 1.0) -> bool:
    try:
        estimator.check(priority, timeout, queue_share=queue_share)
    except ResourceExhausted:
        return False
    return True


def test_before_the_capacity_is_known_every_request_is_admitted() -> None:
    unknown = WaitEstimator(1.0)
    unknown.add(5000, 1 << 20)
    assert unknown.wait_seconds() == 0
    assert is_admitted(unknown)


def test_requests_with_seats_do_not_wait_however_slow_the_queue_is() -> None:
    slow = estimator(seats=8, starts_per_second=0.1)
    for _ in range(7):
        slow.add(1, 1000)
        assert slow.wait_seconds() == 0
    slow.add(1, 1000)
    assert slow.wait_seconds() == pytest.approx(10)


def test_prompts_before_it_cost_their_compute() -> None:
    computing = estimator(seats=100, prefill_tokens_per_second=1000)
    computing.add(2, 4000)
    assert computing.wait_seconds() == pytest.approx(4)
    computing.begin(1, 2000)
    assert computing.wait_seconds() == pytest.approx(2)
    computing.begin(1, 2000)
    computing.end(2)
    assert computing.wait_seconds() == 0
    assert (computing.live, computing.pending, computing.pending_tokens) == (0, 0, 0)


@pytest.mark.parametrize(("seats", "num_waiting"), [(1, 256), (16, 256), (1000, 1000)])
def test_before_a_rate_is_known_so_many_may_wait(seats: int, num_waiting: int) -> None:
    new = estimator(seats=seats)
    admitted = 0
    while is_admitted(new):
        new.add(1, 10)
        admitted += 1
    assert admitted == seats + num_waiting


def test_the_requests_of_other_gateways_count_once() -> None:
    ours = estimator(seats=10)
    ours.add(4, 400)
    ours.observe(Capacity(seats=10, prefill_tokens_per_second=100, starts_per_second=2, live=14, waiting_tokens=600))
    assert ours.wait_seconds() == pytest.approx(6)  # 600 tokens; and 5 requests before it at 2 a second
    ours.begin(4, 400)  # ours run now
    assert ours.wait_seconds() == pytest.approx(2.5)


def test_without_a_coordinator_the_own_requests_still_count() -> None:
    capacity = Capacity(seats=10, starts_per_second=2, live=30, waiting_tokens=600)
    ours = WaitEstimator(10.0, always_queued=0)
    ours.add(14, 600)
    ours.observe(capacity)
    assert ours.wait_seconds() == pytest.approx(10.5)
    ours.observe(capacity.without_load())
    assert ours.wait_seconds() == pytest.approx(2.5)


def test_the_least_important_requests_are_refused_first() -> None:
    busy = estimator(seats=10, starts_per_second=1)
    refused_at: dict[int, int] = {}
    for live in range(100):
        for priority in (-5, -1, 0, 1, 9):
            if not is_admitted(busy, priority):
                refused_at.setdefault(priority, live)
        busy.add(1, 1)
    assert list(refused_at) == [9, 1, 0, -1, -5]
    assert refused_at[0] == 20
    assert refused_at[-5] < 30  # at most twice as long as an ordinary request


def test_a_request_that_would_miss_its_own_deadline_is_refused() -> None:
    busy = estimator(seats=10, starts_per_second=1)
    busy.add(14, 14)
    assert busy.wait_seconds() == pytest.approx(5)
    assert is_admitted(busy, timeout=6)
    assert not is_admitted(busy, timeout=4)


def test_a_tenant_waits_only_for_its_part_of_the_queue() -> None:
    busy = estimator(seats=10, starts_per_second=1)
    busy.add(25, 25)
    assert busy.wait_seconds() == pytest.approx(16)
    assert not is_admitted(busy)
    assert is_admitted(busy, queue_share=0.5)
    assert is_admitted(busy, queue_share=0.0)


def test_a_refusal_says_when_to_retry_and_spreads_the_retries() -> None:
    busy = estimator(seats=10, starts_per_second=1)
    busy.add(29, 29)
    times = []
    for _ in range(100):
        with pytest.raises(ResourceExhausted, match=r"would wait about 20 s .* may wait 10 s") as refusal:
            busy.check(0, HOUR)
        assert refusal.value.retry_after is not None
        times.append(refusal.value.retry_after)
    assert 10 <= min(times) < 12
    assert 28 < max(times) <= 30


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["word " * 100], 126),
        (["a", "b"], 2),
        ([[1, 2, 3], [4]], 4),
        (Chat(b"x" * 400, b"y" * 40), 110),
        ([EmbeddedPrompt([[1, 2], b"z" * 8192])], 4),
    ],
)
def test_prompt_tokens_are_estimated_without_encoding(prompts: object, expected: int) -> None:
    generate_request = GenerateRequest(prompts, "prompt", types_pb2.SamplingParams(), tenant=NO_TENANT)  # type: ignore[arg-type]
    assert estimate_prompt_tokens(generate_request) == expected


def test_few_requests_are_admitted_whatever_the_estimate_says() -> None:
    slow = WaitEstimator(1.0, random.Random(0), always_queued=3)
    slow.observe(Capacity(seats=1, prefill_tokens_per_second=1, starts_per_second=0.01, live=50, waiting_tokens=5000))
    admitted = 0
    while is_admitted(slow):
        slow.add(1, 10)
        admitted += 1
    assert admitted == 3


def test_of_pooling_calls_only_those_count_that_are_at_the_engines() -> None:
    """Four calls of 2,000 texts at a new mesh: two of them got 503, as if 1,024 texts waited for seats."""
    new = estimator(seats=128)
    for _ in range(4):
        assert is_admitted(new)
        new.add(256, 8000)
        new.pooled += 256
    assert new.wait_seconds() == pytest.approx((POOLED_AT_ONCE + 1 - 128) / 25.6)
    new.observe(Capacity(seats=128, live=POOLED_AT_ONCE))
    assert new.wait_seconds() == pytest.approx((POOLED_AT_ONCE + 1 - 128) / 25.6), "they count once"


def test_before_a_rate_is_known_a_shorter_timeout_refuses_no_more() -> None:
    """With a queue of an hour and a timeout of ten minutes, the first waiting requests were refused."""
    new = estimator(HOUR, seats=128)
    new.add(256, 10)
    assert is_admitted(new, timeout=600)
    new.add(200, 10)
    assert not is_admitted(new, timeout=600)
