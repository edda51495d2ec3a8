"""Every token of a request counts once."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.gateway.generation.charge import Charge, Charges
from tokenloom.services.gateway.generation.claim import NEW, Claim
from tokenloom.services.gateway.usage_counts import Used


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


def test_a_request_is_known_by_tenant_and_id() -> None:
    charges = Charges()
    charge = charges.of("a", "1", NEW)
    assert charges.of("a", "1", NEW) is charge
    assert charges.of("b", "1", NEW) is not charge
    assert charges.of("a", "2", NEW) is not charge


def test_a_resumed_request_that_is_not_known_continues_where_its_client_is() -> None:
    claim = Claim("1", b"body", resumes=True, num_delivered=(4,))
    charges = Charges()
    assert charges.of("a", "1", claim).add(7, 0, [6]) == Used(0, 0, 0, 2)
    known = charges.of("a", "2", NEW)
    known.add(7, 0, [1])
    assert charges.of("a", "2", claim).add(7, 0, [6]) == Used(0, 0, 0, 5), "this gateway knows it better"


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    charges = Charges(most=2)
    first, second = charges.of("a", "1", NEW), charges.of("a", "2", NEW)
    assert charges.of("a", "1", NEW) is first
    charges.of("a", "3", NEW)
    assert charges.of("a", "1", NEW) is first
    assert charges.of("a", "2", NEW) is not second
