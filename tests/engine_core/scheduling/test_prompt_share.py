import statistics

import pytest

from tests.engine_core.helpers import make_request
from tests.engine_core.planned_steps import TimedSteps
from tokenloom.engine_core.data.request import Request
from tokenloom.engine_core.scheduling.seats import PromptShare

SECOND = 10**9


@pytest.fixture
def share() -> PromptShare:
    return PromptShare(128)


@pytest.fixture
def known(share: PromptShare) -> PromptShare:
    """Return the share of a model that computes 1,000 prompt tokens a second, and decodes in steps of 0.2 s."""
    share.observe(2000, 2.0)
    share.observe(0, 0.2)
    return share


def prompt(num_tokens: int, arrival: float = 0.0, priority: int = 0) -> Request:
    message = make_request(f"{num_tokens} at {arrival}", [1] * num_tokens, priority=priority)
    return Request(message, 100_000, round(arrival * SECOND))


def test_while_costs_are_unknown_a_step_computes_the_least_for_each_prompt_that_outnumbers(share: PromptShare) -> None:
    prompts = [prompt(1000)] * 8
    assert [share.num_tokens(4, prompts[:count], 0) for count in (1, 4, 5, 8)] == [128, 128, 160, 256]
    share.observe(2000, 2.0)
    assert share.num_tokens(4, prompts[:1], 0) == 128, "a decode step is not known yet"


def test_a_prompt_beside_others_takes_half_of_the_time(known: PromptShare) -> None:
    assert known.num_tokens(32, [prompt(5000)], 0) == 200


def test_a_prompt_slows_others_down_as_much_as_it_was_slowed_down(known: PromptShare) -> None:
    late = round(3.6 * SECOND)  # alone it takes 1.8 + 0.2 s, and it has waited for all of that once and 0.8 times more
    assert known.num_tokens(32, [prompt(1800)], late) == pytest.approx(200 * (3.6 + 2.0) / 2.0, abs=1)


def test_a_wait_for_a_seat_is_not_made_up_for(known: PromptShare) -> None:
    assert known.num_tokens(32, [prompt(1800)], 100 * SECOND, 99 * SECOND) == pytest.approx(200 * 3 / 2, abs=1)


def test_prompts_that_wait_for_each_other_take_one_step(known: PromptShare) -> None:
    assert known.num_tokens(32, [prompt(600)] * 4, 0) == pytest.approx(200 + 3 * 600, abs=4)
    assert known.num_tokens(32, [prompt(900)] * 2, 0) == pytest.approx(200 + 200 * (0.2 + 1.8) / 1.1, abs=4)
    assert known.num_tokens(32, [prompt(100)] * 20, 0) == 2000


def test_no_small_rest_of_a_prompt_takes_another_step(known: PromptShare) -> None:
    assert [known.num_tokens(32, [prompt(count)], 0) for count in (200, 400, 401)] == [200, 400, 200]


def test_a_fast_model_delays_few_others_by_60_ms_together(share: PromptShare) -> None:
    share.observe(2000, 0.1)
    share.observe(0, 0.001)
    assert [share.num_tokens(decoding, [prompt(5000)], 0) for decoding in (1, 2, 4, 16)] == [1200, 600, 300, 75]


def test_a_very_slow_model_computes_half_of_the_least(share: PromptShare) -> None:
    share.observe(500, 20.0)
    share.observe(0, 0.1)
    assert share.num_tokens(1, [prompt(5000)], 0) == 64


def test_few_prompt_tokens_and_steps_of_no_time_say_nothing(share: PromptShare) -> None:
    share.observe(0, 0.2)
    share.observe(63, 0.001)
    share.observe(500, 0.0)
    assert share.num_tokens(1, [prompt(5000)], 0) == 128


def test_the_time_of_the_tokens_beside_a_prompt_is_not_the_prompts(known: PromptShare) -> None:
    for _ in range(20):
        known.observe(300, 0.5, beside_others=True)
    assert known.num_tokens(32, [prompt(5000)], 0) == pytest.approx(200, abs=1)


def test_one_slow_step_changes_little(known: PromptShare) -> None:
    known.observe(2000, 200.0)
    assert 170 < known.num_tokens(32, [prompt(5000)], 0) < 200


def test_prompts_alone_take_steps_in_which_reading_the_weights_is_little(share: PromptShare) -> None:
    assert share.most_at_once > 10**9
    share.observe(2000, 2.0)
    share.observe(0, 0.2)
    assert share.most_at_once == 1600


def test_a_burst_takes_larger_steps_the_more_prompts_wait(share: PromptShare) -> None:
    share.observe(2000, 2.0)
    assert share.most_of_burst([prompt(100)] * 40) > 10**9, "a decode step is not known yet"
    share.observe(0, 0.02)
    assert share.most_at_once == 160
    sizes = [share.most_of_burst([prompt(128)] * count) for count in (0, 1, 3, 4, 32)]
    assert sizes == [160, 160, 160, int((3 * 4 * 128 * 20) ** 0.5), int((3 * 32 * 128 * 20) ** 0.5)]


def test_long_prompts_make_no_burst(share: PromptShare) -> None:
    share.observe(2000, 2.0)
    share.observe(0, 0.02)
    assert share.most_of_burst([prompt(321)] * 32) == 160, "a short prompt that comes meanwhile waits for the step"
    assert share.most_of_burst([prompt(320)] * 32 + [prompt(4000)]) == int((3 * 32 * 320 * 20) ** 0.5)


def test_short_prompts_overtake_long_ones_until_these_have_waited_long(known: PromptShare) -> None:
    long, short, urgent = prompt(10_000), prompt(100, 5.0), prompt(10_000, 6.0, priority=-1)
    soon, late = round(6.0 * SECOND), round(5.1 * SECOND)
    assert known.by_slowdown([long, short, urgent], soon) == [urgent, short, long]
    assert known.by_slowdown([long, short], late) == [long, short]
    equal = [prompt(100, 1.0), prompt(100, 0.5)]
    assert known.by_slowdown(equal, soon) == equal[::-1]


# Costs of qwen3-0.6b on two processors, and of a quicker pair.
SLOW = (0.05, 0.0025, 0.0011, 0.02)
QUICK = (0.022, 0.0017, 0.0012, 0.012)


def burst(costs: tuple[float, float, float, float], **settings: object) -> TimedSteps:
    steps = TimedSteps(*costs, **settings)
    for number in range(32):
        steps.add(f"r{number}", 128, 128)
    steps.finish()
    return steps


@pytest.mark.parametrize("costs", [SLOW, QUICK], ids=["slow", "quick"])
def test_the_last_first_token_of_a_burst_is_hardly_later_than_by_large_steps(
    costs: tuple[float, float, float, float],
) -> None:
    """Large steps are what vLLM takes: as many tokens of prompts as fit beside those that decode."""
    large, ours = burst(costs, prefill_tokens_beside_decode=None), burst(costs)
    assert max(ours.first.values()) < 1.03 * max(large.first.values())
    assert statistics.median(ours.first.values()) < 0.85 * statistics.median(large.first.values())
    assert ours.now < 1.01 * large.now, "as many tokens a second"
    assert max(ours.gaps) < 1.05 * max(large.gaps)


def mixed(**settings: object) -> TimedSteps:
    """Serve 16 short prompts, two a second, and two long ones."""
    steps = TimedSteps(*SLOW, **settings)
    for number in range(16):
        while steps.now < number / 2:
            steps.step()
        steps.add(f"s{number}", 128, 64)
        if number in (4, 8):
            steps.add(f"l{number}", 4000, 64)
    steps.finish()
    return steps


def test_short_prompts_do_not_wait_for_long_ones_nor_tokens_for_a_whole_step() -> None:
    large, ours = mixed(prefill_tokens_beside_decode=None), mixed()
    short = [[seconds for name, seconds in each.first.items() if name[0] == "s"] for each in (ours, large)]
    assert max(short[0]) < 0.6 * max(short[1])
    assert statistics.quantiles(ours.gaps, n=100)[98] < 0.4 * statistics.quantiles(large.gaps, n=100)[98]
    assert max(seconds for name, seconds in ours.first.items() if name[0] == "l") < 15


def test_a_long_prompt_is_computed_however_many_short_ones_come() -> None:
    steps = TimedSteps(*SLOW)
    steps.add("long", 4000, 1)
    number = 0
    while "long" not in steps.first:
        steps.add(f"s{number}", 128, 1)  # as many as the engine can compute, and more
        steps.add(f"t{number}", 128, 1)
        steps.step()
        number += 1
        assert steps.now < 40


def test_under_overload_no_prompt_stops_the_streams() -> None:
    """Each prompt has waited long for its seat."""
    longest = []
    for limit in (None, 128):
        steps = TimedSteps(*SLOW, max_num_seqs=8, prefill_tokens_beside_decode=limit)
        for number in range(40):
            steps.add(f"r{number}", 1000, 60 + 7 * (number % 16))
        while len(steps.first) < 8:
            steps.step()
        steps.gaps.clear()
        steps.finish()
        longest.append(max(steps.gaps))
    assert longest[1] < 0.5 * longest[0]


def test_those_that_decode_wait_for_no_more_than_a_full_step() -> None:
    steps = TimedSteps(*SLOW)
    steps.add("first", 10, 500)
    while "first" not in steps.first:
        steps.step()
    for number in range(60):
        steps.add(f"r{number}", 500, 2)
    held = 0
    while "first" in steps.scheduler.requests:
        held += "first" not in steps.step().num_scheduled_tokens
    assert held > 10
    assert max(steps.gaps) < 2048 * 0.0011 + 0.05 + 64 * 0.0025 + 0.01
