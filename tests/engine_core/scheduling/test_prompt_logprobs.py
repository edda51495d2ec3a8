"""Tests how the parts of a prompt's log probabilities are joined, also after preemptions."""

import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVTarget
from tokenloom.engine_core.data.messages import EngineCoreRequest, Logprobs
from tokenloom.engine_core.data.request import Request

PROMPT = list(range(10))


def make_request(**fields):
    params = CoreSamplingParams(max_tokens=5, seed=1, prompt_logprobs=1, **fields.pop("params", {}))
    return Request(EngineCoreRequest("r", PROMPT, params, **fields), 100, 0)


def part(start, count):
    """Return log probabilities of ``count`` positions from ``start`` on; each value is derived from its position."""
    positions = list(range(start, start + count))
    return Logprobs([-float(p) for p in positions], positions.copy(), 1, positions, [-float(p) for p in positions])


def test_chunks_are_joined_and_returned_once():
    request = make_request()
    assert request.kv.skip_reading_prefix_cache
    assert request.take_prompt_logprobs(0, 4, part(0, 4)) is None
    assert request.take_prompt_logprobs(4, 4, part(4, 4)) is None
    assert request.take_prompt_logprobs(8, 2, part(8, 1)) == part(0, 9)
    assert not request.kv.skip_reading_prefix_cache
    assert request.take_prompt_logprobs(0, 10, part(0, 9)) is None


def test_the_last_token_of_a_prompt_may_come_alone():
    request = make_request()
    assert request.take_prompt_logprobs(0, 9, part(0, 9)) is None
    assert request.take_prompt_logprobs(9, 1, Logprobs([], [], 1)) == part(0, 9)


def test_a_new_life_begins_anew_and_an_old_ones_part_is_dropped():
    request = make_request()
    assert request.take_prompt_logprobs(0, 6, part(0, 6)) is None
    assert request.take_prompt_logprobs(0, 3, part(0, 3)) is None
    assert request.take_prompt_logprobs(6, 2, part(6, 2)) is None
    assert request.take_prompt_logprobs(3, 7, part(3, 6)) == part(0, 9)


def test_a_requested_cache_skip_remains():
    request = make_request(params={"skip_reading_prefix_cache": True})
    request.take_prompt_logprobs(0, 10, part(0, 9))
    assert request.kv.skip_reading_prefix_cache


@pytest.mark.parametrize(
    "fields",
    [
        {"accepted_token_ids": [5]},
        {"awaits_tokens": True},
        {"remote_kv": KVTarget(b"id", "shm", b"", [0], [0], num_tokens=10)},
    ],
)
def test_a_continued_output_has_no_prompt_logprobs(fields):
    request = make_request(**fields)
    assert request.prompt_logprobs is None
    assert not request.kv.skip_reading_prefix_cache
    assert request.take_prompt_logprobs(0, 10, part(0, 9)) is None


def test_a_prefill_leg_has_prompt_logprobs():
    assert make_request(lease_id=b"l").prompt_logprobs is not None
