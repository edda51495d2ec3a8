import pytest

from tokenloom.engine_core.scheduling.step_planner import PromptShare


@pytest.fixture
def share() -> PromptShare:
    return PromptShare(128)


def test_a_model_of_unknown_speed_computes_the_least(share: PromptShare) -> None:
    assert share.num_tokens(4, 1) == 128


def test_prompts_that_outnumber_the_decoding_requests_get_more(share: PromptShare) -> None:
    assert [share.num_tokens(4, waiting) for waiting in (0, 1, 4, 5, 8)] == [128, 128, 128, 160, 256]


def test_within_the_delay_a_prompt_that_waits_weighs_as_much_as_two_requests(share: PromptShare) -> None:
    share.observe(500, 0.025)
    assert [share.num_tokens(4, waiting) for waiting in (1, 2, 3, 4)] == [300, 300, 375, 525]


def test_a_fast_model_delays_the_others_by_60_ms_together(share: PromptShare) -> None:
    share.observe(500, 0.025)
    assert [share.num_tokens(decoding, 1) for decoding in (1, 2, 4, 16)] == [1200, 600, 300, 128]


def test_a_slow_model_delays_each_token_by_80_ms(share: PromptShare) -> None:
    share.observe(500, 0.4)
    assert share.num_tokens(8, 1) == 100


def test_a_very_slow_model_computes_half_of_the_least(share: PromptShare) -> None:
    share.observe(500, 2.0)
    assert share.num_tokens(1, 1) == 64


def test_steps_of_decoding_requests_and_of_no_time_say_nothing(share: PromptShare) -> None:
    share.observe(127, 0.001)
    share.observe(500, 0.0)
    assert share.num_tokens(1, 1) == 128


def test_one_slow_step_changes_little(share: PromptShare) -> None:
    share.observe(2000, 0.1)
    share.observe(2000, 10.0)
    assert 1000 < share.num_tokens(1, 1) < 1200
