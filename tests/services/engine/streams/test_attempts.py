"""Whatever happens to an attempt, in whatever order, its Add is answered once and its count is right."""

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.engine.peer import Received, make_add
from tokenloom.engine_core.data.messages import EngineCoreOutput, ErrorKind, FinishReason, PrefillStats, RoutedExperts
from tokenloom.request.errors import DeadlineExceeded, InvalidArgument, RateLimitExceeded, ResourceExhausted
from tokenloom.request.wire_errors import from_proto
from tokenloom.services.engine.records.attempt import Attempt
from tokenloom.services.engine.streams.connect_stream import Attempts
from tokenloom.services.engine.streams.frame_builder import FrameBuilder
from tokenloom.v1.coordinator_pb2 import EngineRef
from tokenloom.v1.types_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, ModelLimits

OWNER = EngineRef(engine_id="engine-0", epoch=5)
LIMITS = ModelLimits(max_model_len=64, vocab_size=100)


def make_attempts() -> tuple[Attempts, FrameBuilder]:
    builder = FrameBuilder()
    attempts = Attempts(7, LIMITS, builder, lambda: None, lambda: 0.0, Random(0), kv_owner=OWNER, lease_seconds=30.0)
    return attempts, builder


def test_what_the_core_measured_is_told_with_the_end() -> None:
    attempts, builder = make_attempts()
    attempt = attempts.open(make_add(3, [1, 2], 9, tenant="someone"))
    assert attempt.request is not None
    assert attempt.request.request_id == attempt.key == "7.3"
    assert attempt.request.tenant == "someone"
    stats = PrefillStats(num_prompt_tokens=2, num_cached_tokens=1, queued_ns=5, prefill_ns=6)
    attempts.take_output(attempt, EngineCoreOutput("7.3", [4], prefill_stats=stats))
    attempts.take_output(attempt, EngineCoreOutput("7.3", [5], 1, FinishReason.STOP, stop_token_id=5))
    finished = builder.take(1).finished[0]
    assert (finished.reason, finished.num_output_tokens, finished.stop_token_id) == (FINISH_REASON_STOP, 2, 5)
    assert (finished.cached_tokens, finished.queued_ns, finished.prefill_ns) == (1, 5, 6)


def test_experts_of_all_steps_are_sent_with_the_end() -> None:
    attempts, builder = make_attempts()
    attempt = attempts.open(make_add(3, [1, 2]))
    first, second = RoutedExperts(0, 1, 1, 1, b"\x05\x06"), RoutedExperts(2, 1, 1, 1, b"\x07")
    attempts.take_output(attempt, EngineCoreOutput("7.3", [4], routed_experts=first))
    attempts.take_output(attempt, EngineCoreOutput("7.3", [5], 1, FinishReason.LENGTH, routed_experts=second))
    frame = builder.take(1)
    assert (frame.finished[0].routed_experts.start, frame.finished[0].routed_experts.expert_ids) == (0, b"\x05\x06\x07")


def test_what_the_core_could_not_do_may_be_tried_again() -> None:
    attempts, builder = make_attempts()
    attempt = attempts.open(make_add(1, [1]))
    attempts.take_output(attempt, EngineCoreOutput("7.1", [], finish_reason=FinishReason.ERROR, error="shutting down"))
    finished = builder.take(1).finished[0]
    assert finished.reason == FINISH_REASON_ERROR
    assert (finished.error.reason, finished.error.message) == ("UNAVAILABLE", "shutting down")


def test_what_cannot_be_computed_is_not_worth_another_try() -> None:
    attempts, builder = make_attempts()
    attempt = attempts.open(make_add(1, [1]))
    output = EngineCoreOutput(
        "7.1", [], finish_reason=FinishReason.ERROR, error="no logit", error_kind=ErrorKind.INTERNAL
    )
    attempts.take_output(attempt, output)
    finished = builder.take(1).finished[0]
    assert finished.reason == FINISH_REASON_ERROR
    assert (finished.error.reason, finished.error.message) == ("INTERNAL", "no logit")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ErrorKind.ENGINE_FULL, ResourceExhausted), (ErrorKind.TENANT_FULL, RateLimitExceeded)],
)
def test_a_limit_says_when_to_retry(kind: ErrorKind, expected: type[ResourceExhausted]) -> None:
    attempts, builder = make_attempts()
    attempt = attempts.open(make_add(1, [1]))
    output = EngineCoreOutput("7.1", [], finish_reason=FinishReason.ERROR, error="too many", error_kind=kind)
    attempts.take_output(attempt, output)
    error = from_proto(builder.take(1).finished[0].error)
    assert type(error) is expected
    assert (error.message, error.retry_after) == ("too many", 1.0)


def test_a_refused_add_is_answered_and_never_live() -> None:
    attempts, builder = make_attempts()
    with pytest.raises(InvalidArgument) as refusal:
        attempts.open(make_add(1, []))
    attempts.refuse(make_add(1, []), refusal.value)
    assert not attempts.live
    assert builder.take(1).finished[0].error.field == "prompt"


class OneAnswer(RuleBasedStateMachine):
    """Random order of steps, stops, aborts, failures and reads, for a few slots."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts, self.builder = make_attempts()
        self.received = Received()
        self.opened: dict[int, Attempt] = {}
        self.live: dict[int, Attempt] = {}
        self.stopped: dict[int, int] = {}

    @rule(accepted=st.integers(0, 3))
    def add(self, accepted: int) -> None:
        slot = len(self.opened) + 1
        attempt = self.attempts.open(make_add(slot, [1], 50, accepted_token_ids=[1] * accepted))
        self.opened[slot] = self.live[slot] = attempt

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 3), reason=st.sampled_from([None, None, *FinishReason]))
    def step(self, data: Any, count: int, reason: FinishReason | None) -> None:
        slot = data.draw(st.sampled_from(sorted(self.live)))
        attempt = self.live[slot]
        output = EngineCoreOutput(attempt.key, [slot] * count, attempt.tokens.output, reason)
        self.attempts.take_output(attempt, output)
        if reason is not None:
            del self.live[slot]

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), kind=st.sampled_from(["abort", "fail", "stop"]), num_tokens=st.integers(0, 8))
    def end(self, data: Any, kind: str, num_tokens: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.opened)))
        if kind == "abort":
            ended = self.attempts.abort(slot)
        elif kind == "fail":
            ended = self.attempts.fail(slot, DeadlineExceeded("late"))
        else:
            ended = self.attempts.stop_at(slot, num_tokens)
        assert ended is self.live.pop(slot, None)

    @rule()
    def read(self) -> None:
        if self.builder.has_data:
            self.received.take(self.builder.take(1))

    @invariant()
    def live_ones_are_not_answered(self) -> None:
        assert self.attempts.live.keys() == self.live.keys()
        assert not self.live.keys() & self.received.finished.keys()

    def teardown(self) -> None:
        for slot in self.live:
            self.attempts.abort(slot)
        while self.builder.has_data:
            self.received.take(self.builder.take(1))
        assert self.received.finished.keys() == self.opened.keys()
        for slot, finished in self.received.finished.items():
            num_tokens = self.opened[slot].tokens.accepted + len(self.received.token_ids.get(slot, ()))
            if finished.reason == FINISH_REASON_STOP:
                assert finished.num_output_tokens <= num_tokens  # tokens beyond a stop may have gone before it
            else:
                assert finished.num_output_tokens == num_tokens


TestOneAnswer = OneAnswer.TestCase
TestOneAnswer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
