"""What a leg costs on an engine by each rule."""

import numpy as np
import pytest

from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.placement.pairing import best
from tokenloom.services.runtime.placement.pool import BATCH_STEPS, Candidates
from tokenloom.services.runtime.placement.rules import (
    BROUGHT_BACK,
    EXCESS,
    EXCESS_STEPS,
    HOME_SHARE,
    MAX_PRESSURE,
    RECOMPUTED,
    Ask,
    Home,
    Offers,
    cost,
    plugged_rule,
)
from tokenloom.v1.types_pb2 import EngineRole

PREFILL, DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


def both() -> Candidates:
    """The two engines, of whose speeds nothing is remembered."""
    return Candidates(np.arange(2))


@pytest.fixture
def engines() -> EngineColumns:
    """Two idle engines that compute 1,000 tokens/s, with steps of 20 ms of at most 10 requests."""
    columns = EngineColumns()
    for _ in range(2):
        row = columns.add()
        columns.computed_rate[row], columns.step_seconds[row], columns.seats[row] = 1000.0, 0.02, 10
        columns.free_tokens[row] = 1 << 20
        columns.is_serving[row] = True
    return columns


def cached(tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the cached tokens of an ask of which the second engine has so many."""
    column = np.zeros(16, np.int64)
    column[1] = tokens
    return column


def test_the_cost_is_the_time_of_all_uncached_tokens(engines: EngineColumns) -> None:
    engines.uncached_tokens[0] = 500
    assert cost(engines, both(), Ask(PREFILL, 2000)) == pytest.approx([2.5, 2.0])
    assert cost(engines, both(), Ask(PREFILL, 2000, cached(1600))) == pytest.approx([2.5, 0.4])


def test_a_faster_engine_may_have_more_to_compute(engines: EngineColumns) -> None:
    engines.computed_rate[1], engines.uncached_tokens[1] = 4000.0, 2000
    assert best(engines, both(), Ask(PREFILL, 2000), cost) == 1
    engines.uncached_tokens[1] = 6100
    assert best(engines, both(), Ask(PREFILL, 2000), cost) == 0


def test_a_cached_prefix_draws_until_the_queue_there_takes_longer(engines: EngineColumns) -> None:
    ask = Ask(PREFILL, 4000, cached(3000))
    engines.uncached_tokens[1] = 2900
    assert best(engines, both(), ask, cost) == 1
    engines.uncached_tokens[1] = 3100
    assert best(engines, both(), ask, cost) == 0


def test_a_share_of_the_batch_costs_steps(engines: EngineColumns) -> None:
    engines.running[0], engines.waiting[0], engines.running[1] = 4, 1, 4
    assert cost(engines, both(), Ask(DECODE, 2000)) == pytest.approx([BATCH_STEPS * 0.02 * each for each in (0.5, 0.4)])
    assert best(engines, both(), Ask(DECODE, 2000), cost) == 1


def test_requests_above_the_mean_cost_steps_each_so_that_a_popular_prefix_is_computed_twice(
    engines: EngineColumns,
) -> None:
    engines.seats[:] = 1 << 20
    engines.running[0], engines.running[1] = 2, 18
    excess = 18 - EXCESS * 10
    assert cost(engines, both(), Ask(DECODE, 2000)) == pytest.approx([0, excess * EXCESS_STEPS * 0.02], abs=0.01)
    ask = Ask(PREFILL, 3000, cached(2500))
    assert best(engines, both(), ask, cost) == 0
    engines.running[0] = 17
    assert best(engines, both(), ask, cost) == 1


def test_what_was_not_measured_is_as_for_the_others(engines: EngineColumns) -> None:
    engines.computed_rate[1] = engines.step_seconds[1] = engines.seats[1] = 0
    assert cost(engines, both(), Ask(PREFILL, 2000)) == pytest.approx([2.0, 2.0])
    engines.computed_rate[0] = 0
    first, second = cost(engines, both(), Ask(PREFILL, 2000))
    assert first == second > 0


def test_a_home_of_the_prompt_counts_as_if_it_had_computed_a_share(engines: EngineColumns) -> None:
    ask = Ask(PREFILL, 2000, homes=[1, 7])
    assert cost(engines, both(), ask) == pytest.approx([2.0, 2.0 * (1 - HOME_SHARE)])
    assert cost(engines, both(), Ask(DECODE, 2000, homes=[1])) == pytest.approx([0, 0])


def test_requests_that_run_at_a_sessions_engine_are_not_too_many_for_it(engines: EngineColumns) -> None:
    engines.running[1] = 9
    assert best(engines, both(), Ask(PREFILL, 2000, cached(1900)), cost) == 0
    assert best(engines, both(), Ask(PREFILL, 2000, cached(1900), session=Home(1, 1900)), cost) == 1
    assert best(engines, both(), Ask(DECODE, 2000, session=Home(1, 1900)), cost) == 0


@pytest.mark.parametrize("wait", [-100, 100])
def test_a_session_leaves_its_kv_for_a_wait_that_takes_longer_than_to_compute_it_anew(
    engines: EngineColumns, wait: int
) -> None:
    ask = Ask(PREFILL, 5000, cached(4800), session=Home(1, 4800))
    engines.uncached_tokens[1] = RECOMPUTED * 4800 + wait
    assert best(engines, both(), ask, cost) == (0 if wait > 0 else 1)


def test_what_other_engines_have_of_a_session_is_not_computed_anew_there(engines: EngineColumns) -> None:
    tokens = cached(4800)
    tokens[0] = 4000
    engines.uncached_tokens[1] = RECOMPUTED * 800 + 1
    assert best(engines, both(), Ask(PREFILL, 5000, tokens, session=Home(1, 4800)), cost) == 0


def test_a_session_without_cached_blocks_counts_as_brought_back_in_part(engines: EngineColumns) -> None:
    ask = Ask(PREFILL, 5000, session=Home(1, 4000))
    assert cost(engines, both(), ask) == pytest.approx([RECOMPUTED * 5, RECOMPUTED * (5 - BROUGHT_BACK * 4)])


@pytest.mark.parametrize(("seats", "free_tokens"), [(10, 100), (5, 1 << 20)], ids=["no block", "no seat"])
def test_requests_that_wait_for_room_at_a_sessions_engine_cost_steps_each(
    engines: EngineColumns, seats: int, free_tokens: int
) -> None:
    ask = Ask(PREFILL, 1000, cached(800), session=Home(1, 800))
    engines.waiting[1], engines.running[1] = 4, 5
    assert best(engines, both(), ask, cost) == 1
    engines.seats[1], engines.free_tokens[1] = seats, free_tokens
    seconds = 4 * BATCH_STEPS * 0.02 / seats + (4 - EXCESS * 2) * EXCESS_STEPS * 0.02
    assert cost(engines, both(), ask) == pytest.approx([RECOMPUTED, 0.2 * RECOMPUTED + seconds])
    engines.waiting[1] = 8
    assert best(engines, both(), ask, cost) == 0
    engines.running[1], engines.seats[1] = 0, 5
    assert best(engines, both(), ask, cost) == 1, "they begin at once"


def test_a_session_does_not_leave_its_kv_for_an_engine_whose_sessions_fill_the_cache(engines: EngineColumns) -> None:
    ask = Ask(PREFILL, 1000, cached(800), session=Home(1, 800, share=0.5))
    engines.waiting[1], engines.running[1], engines.seats[1] = 8, 5, 9
    alone = cost(engines, both(), ask)
    assert best(engines, both(), ask, cost) == 0
    engines.session_share[:2] = 1.0, 4.0
    assert cost(engines, both(), ask) == pytest.approx(alone), "its own engine has its KV already"
    engines.session_share[0] = 3.5
    assert cost(engines, both(), ask) == pytest.approx(np.add(alone, [2.5, 0.0])), "what is evicted is computed again"
    engines.session_share[0] = 9.0
    assert cost(engines, both(), ask) == pytest.approx(np.add(alone, [MAX_PRESSURE, 0.0]))
    engines.waiting[1] = 7
    assert best(engines, both(), ask, cost) == 1


def test_a_session_that_begins_goes_where_sessions_need_less_of_the_kv(engines: EngineColumns) -> None:
    engines.session_share[:2] = 0.25, 1.0
    ask = Ask(PREFILL, 2000, cached(1400), session=Home(None))
    assert cost(engines, both(), ask) == pytest.approx([2.0 + 0.25 * 2, 0.6 + 1.0 * 2])
    assert best(engines, both(), ask, cost) == 0, "three quarters of a KV cache outweigh a system prompt"
    assert best(engines, both(), ask._replace(session=Home(1, 1400)), cost) == 1, "its KV lies there already"
    assert best(engines, both(), ask._replace(session=Home(7, 1400)), cost) == 0, "its engine takes no part"
    engines.session_share[1] = 1000.0
    assert cost(engines, both(), ask)[1] == pytest.approx(0.6 + MAX_PRESSURE * 2)


def test_requests_without_a_session_cost_the_same_beside_sessions(engines: EngineColumns) -> None:
    engines.running[:2], engines.waiting[:2], engines.uncached_tokens[:2] = (3, 8), (1, 0), (77.7, 1234.5)
    asks = Ask(PREFILL, 2000, cached(1600), homes=[0]), Ask(DECODE, 2000, cached(1600)), Ask(PREFILL, 10)
    before = [cost(engines, both(), ask).tolist() for ask in asks]
    engines.session_share[:2] = 0.5, 3.0
    assert [cost(engines, both(), ask).tolist() for ask in asks] == before


def test_a_plugin_sees_copies_and_its_costs_decide(engines: EngineColumns) -> None:
    seen: list[Offers] = []

    def dearest_first(offers: Offers) -> list[float]:
        seen.append(offers)
        offers.waiting[:] = 99
        return [2.0, 1.0]

    engines.waiting[1] = 5
    rule = plugged_rule(dearest_first, pytest.fail)
    assert best(engines, both(), Ask(PREFILL, 2000, cached(1600)), rule) == 1
    (offers,) = seen
    assert (offers.role, offers.prompt_tokens, offers.cached_tokens.tolist()) == ("prefill", 2000, [0, 1600])
    assert offers.seconds_per_token == pytest.approx([0.001, 0.001])
    assert engines.waiting[:2].tolist() == [0, 5]


@pytest.mark.parametrize("costs", [[1.0], [1.0, float("nan")], "ab", None])
def test_where_a_plugin_fails_the_score_decides(engines: EngineColumns, costs: object) -> None:
    reasons: list[str] = []
    rule = plugged_rule(lambda offers: costs, reasons.append)  # type: ignore[arg-type, return-value]
    engines.waiting[0] = 1
    assert best(engines, both(), Ask(PREFILL, 10), rule) == 1
    assert len(reasons) == 1
