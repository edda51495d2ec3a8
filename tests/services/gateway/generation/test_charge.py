"""Every token of a request counts once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.gateway.generation.charge import KEPT_SECONDS, Charge, Charges
from tokenloom.services.gateway.metrics.usage_counts import Used
from tokenloom.services.gateway.records.request_ids import NEW, ResumeToken


def test_a_call_that_resumes_counts_what_is_beyond_the_others() -> None:
    charge = Charge()
    assert charge.add(7, 0, [3, 5]) == Used(1, 7, 0, 8)
    assert charge.add(7, 4, [2, 6]) == Used(0, 0, 4, 1), "the first output is behind, the second one ahead"
    assert charge.add(7, 4, [9, 6]) == Used(0, 0, 0, 6)
    assert charge.add(7, 4, [9, 6]) == Used()


def test_what_another_gateway_has_counted() -> None:
    charge = Charge([5, 0], has_prompt=True)
    assert charge.add(7, 0, [3, 2, 1]) == Used(0, 0, 0, 3)


@given(st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1))
def test_all_calls_together_count_the_highest_positions(calls: list[list[int]]) -> None:
    charge = Charge()
    used = [charge.add(4, 0, positions) for positions in calls]
    assert sum(each.output_tokens for each in used) == sum(max(column) for column in zip(*calls, strict=True))
    assert [each.requests for each in used] == [1] + [0] * (len(calls) - 1)
    assert sum(each.num_tokens for each in used) == 4 + sum(each.output_tokens for each in used)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def charges(clock: Clock) -> Charges:
    return Charges(clock, most=2)


def repeated(charges: Charges, request_id: str, *, is_complete: bool) -> Charge:
    """The charge of a request whose only call has ended."""
    charge = charges.of("a", request_id, NEW)
    charges.leave("a", request_id, charge, is_complete=is_complete)
    return charge


def resumed(*num_delivered: int) -> ResumeToken:
    return ResumeToken("1", b"body", resumes=True, num_delivered=num_delivered)


def test_a_request_is_known_by_tenant_and_id(charges: Charges) -> None:
    charge = charges.of("a", "1", NEW)
    assert charges.of("a", "1", NEW) is charge
    assert charges.of("b", "1", NEW) is not charge
    assert charges.of("a", "2", NEW) is not charge


def test_a_resumed_request_that_is_not_known_continues_where_its_client_is(charges: Charges) -> None:
    assert charges.of("a", "1", resumed(4)).add(7, 0, [6]) == Used(0, 0, 0, 2)
    known = charges.of("a", "2", NEW)
    known.add(7, 0, [1])
    assert charges.of("a", "2", resumed(4)).add(7, 0, [6]) == Used(0, 0, 0, 5), "this gateway knows it better"


def test_a_client_that_names_a_position_it_never_had_pays_for_what_it_gets(charges: Charges) -> None:
    charge = charges.of("a", "1", resumed(100, 100))
    assert charge.add(7, 0, [3, 0]) == Used()
    assert charges.of("a", "1", resumed(100, 2)) is charge
    assert charge.add(7, 0, [9, 9]) == Used(0, 0, 0, 7)
    assert charges.of("a", "1", resumed(1)) is charge, "of the second output it has nothing now"
    assert charge.add(7, 0, [9, 9]) == Used(0, 0, 0, 10)
    assert charge.add(7, 0, [9, 9]) == Used()


def test_a_repeat_pays_for_the_prompt_that_only_its_client_said_was_counted(charges: Charges) -> None:
    charge = charges.of("a", "1", resumed(100))
    charge.add(7, 0, [0])
    assert charges.of("a", "1", NEW) is charge
    assert charge.add(7, 0, [5]) == Used(1, 7, 0, 5)
    charges.of("a", "1", NEW)
    assert charge.add(7, 0, [5]) == Used()


def test_a_complete_answer_can_be_repeated_for_a_while(charges: Charges, clock: Clock) -> None:
    charge = repeated(charges, "1", is_complete=True)
    clock.now = KEPT_SECONDS - 1
    assert repeated(charges, "1", is_complete=True) is charge
    clock.now = KEPT_SECONDS
    assert charges.of("a", "1", NEW) is not charge


def test_a_repeat_that_fails_leaves_the_answer_known(charges: Charges) -> None:
    charge = repeated(charges, "1", is_complete=True)
    assert repeated(charges, "1", is_complete=False) is charge, "its body has changed, for example"
    assert charges.of("a", "1", NEW) is charge


def test_a_call_that_lasts_longer_than_the_answer_is_kept(charges: Charges, clock: Clock) -> None:
    charge = charges.of("a", "1", NEW)
    clock.now = 2 * KEPT_SECONDS
    assert repeated(charges, "1", is_complete=True) is charge, "it may run for as long as it likes"
    clock.now = 3 * KEPT_SECONDS
    after = charges.of("a", "1", NEW)
    assert after is not charge
    charges.leave("a", "1", charge, is_complete=False)
    assert charges.of("a", "1", NEW) is after


def test_an_answer_that_broke_off_is_computed_again(charges: Charges) -> None:
    charge = repeated(charges, "1", is_complete=False)
    assert charges.of("a", "1", NEW) is not charge


def test_a_cancelled_request_is_computed_again(charges: Charges) -> None:
    ended, running = repeated(charges, "1", is_complete=True), charges.of("a", "2", NEW)
    for request_id, before in (("1", ended), ("2", running), ("2", running)):
        charges.forget("a", request_id)
        after = charges.of("a", request_id, NEW)
        assert after is not before
        charges.leave("a", request_id, before, is_complete=True)
        assert charges.of("a", request_id, NEW) is after, "its calls are others"


def test_what_was_complete_longest_ago_is_forgotten_first(charges: Charges) -> None:
    first, second, running = (charges.of("a", number, NEW) for number in "123")
    charges.leave("a", "2", second, is_complete=True)
    charges.leave("a", "1", first, is_complete=True)
    repeated(charges, "4", is_complete=True)
    assert charges.of("a", "1", NEW) is first
    assert charges.of("a", "2", NEW) is not second
    assert charges.of("a", "3", NEW) is running


def test_a_request_that_another_gateway_has_begun_is_charged_for_the_rest() -> None:
    charge = Charge.of(ResumeToken("a", b"f", resumes=True, num_delivered=(5, 0), is_held=True))
    assert charge.add(10, 4, [7, 3]) == Used(0, 0, 4, 5)
    assert Charge.of(ResumeToken(fingerprint=b"f", is_held=True)).add(10, 4, [7]) == Used(1, 10, 4, 7)
