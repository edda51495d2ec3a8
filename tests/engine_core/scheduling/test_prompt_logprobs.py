"""Parts of a prompt's log probabilities, over the lives that preemptions give a request."""

import pytest

from tokenloom.engine_core.kv_transfer.kv_messages import KVTarget
from tokenloom.engine_core.scheduling.prompt_logprobs import collect_prompt_logprobs
from tokenloom.engine_core.scheduling.request import Request
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.messages import EngineCoreRequest, Logprobs
from tokenloom.engine_core.wire.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput

PROMPT = list(range(10))


def make_request(**fields):
    params = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=1, **fields.pop("params", {}))
    return Request(EngineCoreRequest("r", PROMPT, params, **fields), 100, 0)


def part(start, count):
    """Positions ``start`` and after; the values say which."""
    positions = list(range(start, start + count))
    return Logprobs([-float(p) for p in positions], positions.copy(), 1, positions, [-float(p) for p in positions])


def collect(request, start, num_tokens, told):
    scheduled = SchedulerOutput([], CachedRequestData(["r"], [[]], [start], {}), {"r": num_tokens}, num_tokens, [], [])
    return collect_prompt_logprobs({"r": request}, scheduled, ModelRunnerOutput(["r"], [[]], {}, {"r": told}))


def test_chunks_make_a_whole_that_is_told_once():
    request = make_request()
    assert request.skip_reading_prefix_cache
    assert collect(request, 0, 4, part(0, 4)) == {}
    assert collect(request, 4, 4, part(4, 4)) == {}
    assert collect(request, 8, 2, part(8, 1)) == {"r": part(0, 9)}
    assert not request.skip_reading_prefix_cache
    assert collect(request, 0, 10, part(0, 9)) == {}


def test_the_last_token_of_a_prompt_may_come_alone():
    request = make_request()
    assert collect(request, 0, 9, part(0, 9)) == {}
    assert collect(request, 9, 1, Logprobs([], [], 1)) == {"r": part(0, 9)}


def test_a_new_life_begins_anew_and_an_old_ones_part_is_dropped():
    request = make_request()
    assert collect(request, 0, 6, part(0, 6)) == {}
    assert collect(request, 0, 3, part(0, 3)) == {}
    assert collect(request, 6, 2, part(6, 2)) == {}
    assert collect(request, 3, 7, part(3, 6)) == {"r": part(0, 9)}


def test_a_request_that_ended_meanwhile():
    scheduled = SchedulerOutput([], CachedRequestData(["r"], [[]], [0], {}), {"r": 10}, 10, [], [])
    result = ModelRunnerOutput(["r"], [[5]], {}, {"r": part(0, 9)})
    assert collect_prompt_logprobs({}, scheduled, result) == {}


def test_what_the_user_asked_for_stays():
    request = make_request(params={"skip_reading_prefix_cache": True})
    collect(request, 0, 10, part(0, 9))
    assert request.skip_reading_prefix_cache


@pytest.mark.parametrize(
    "fields",
    [
        {"accepted_token_ids": [5]},
        {"awaits_tokens": True},
        {"remote_kv": KVTarget(b"id", "shm", b"", [0], [0], num_tokens=10)},
    ],
)
def test_whoever_continues_an_output_tells_nothing_of_its_prompt(fields):
    request = make_request(**fields)
    assert request.prompt_logprobs is None
    assert not request.skip_reading_prefix_cache
    assert collect(request, 0, 10, part(0, 9)) == {}


def test_a_prefill_leg_tells():
    assert make_request(lease_id=b"l").prompt_logprobs is not None
