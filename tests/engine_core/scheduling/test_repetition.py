"""Tests the detection of repetition at the end of an output against a simple reference."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine_core.helpers import make_core
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.data.request import is_repeating
from tokenloom.request.sampling_params import RepetitionDetectionParams


def reference(output, detection):
    """Return whether the output ends with a pattern of an allowed size, repeated ``min_count`` times."""
    return any(
        output[-size * detection.min_count :] == output[-size:] * detection.min_count
        for size in range(detection.min_pattern_size, detection.max_pattern_size + 1)
        if size * detection.min_count <= len(output)
    )


@settings(max_examples=400, deadline=None)
@given(
    output=st.lists(st.integers(0, 1), max_size=16),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    min_count=st.integers(2, 4),
)
@example([1, 0, 1, 0, 1, 0], [2, 2], 3)
@example([], [1, 1], 2)
def test_found_exactly_where_it_is(output, sizes, min_count):
    detection = RepetitionDetectionParams(max_pattern_size=sizes[1], min_pattern_size=sizes[0], min_count=min_count)
    prompt = [1, 1, 1, 1]  # no part of the output
    assert is_repeating(prompt + output, len(prompt), detection) == reference(output, detection)


def make_request(accepted, max_tokens=50, min_tokens=0):
    params = CoreSamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=0,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=3),
    )
    return EngineCoreRequest("r", [1, 2, 3], params, accepted_token_ids=accepted)


def test_a_request_that_repeats_itself_ends_so():
    core = make_core(vocab_size=1)
    core.add_request(make_request([]))
    outputs = [core.step().outputs[0] for _ in range(3)]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.REPETITION]
    assert outputs[2].stop_token_id is None
    assert not core.has_requests()
    assert core.scheduler.kv.pool.num_free == core.ready.num_kv_blocks


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(2, 3), (3, 3), (7, 7)])
def test_a_request_does_not_end_below_min_tokens(min_tokens, num_tokens):
    core = make_core(vocab_size=1)
    core.add_request(make_request([], min_tokens=min_tokens))
    outputs = [core.step().outputs[0] for _ in range(num_tokens)]
    reasons = [output.finish_reason for output in outputs]
    assert reasons == [None] * (num_tokens - 1) + [FinishReason.REPETITION]


def test_tokens_of_an_earlier_attempt_count():
    core = make_core()
    core.add_request(make_request([5, 6, 7] * 3))
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.REPETITION


def test_a_limit_met_at_once_wins():
    core = make_core()
    core.add_request(make_request([4, 4, 4], max_tokens=3))
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.LENGTH
