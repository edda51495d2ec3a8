"""A few seeds of the simulation: nothing is violated, and a seed takes the same course in every process."""

import gc
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from tests.simulation.bugs import reintroduced
from tests.simulation.faults import KINDS
from tests.simulation.plan import Fault, Plan, make_plan, with_losses_together, with_lying_owner
from tests.simulation.reference import expected
from tests.simulation.runner import run_plan, run_seed

SEEDS = (*range(40), 491)
"""491: two joins of one engine arrive in the other order behind a link that was cut."""
STANDBY_SEEDS = 12
ADMINISTERED_SEEDS = 12
CHAT_SEEDS = 12
STATE_SEEDS = 12
IMAGE_SEEDS = 12
MIGRATION_SEEDS = 16
TOGETHER_SEEDS = (*range(24), 7079)
"""7079: a request is lost with its output processor a second time, before its first token."""
STUTTER_SEEDS = (0, 21)
"""21: requests wait at gateways, one of which is killed, while calls seek them."""
LIAR_SEEDS = 24
MOVER_SEEDS = 8
OWNER_SEEDS = 16
REDRAWN = ("has_states", "has_images", "has_movers", "has_losses_together", "has_migrations")
"""Kinds that draw the prompts or clients of a plan again, and thus what is expected of those before them."""
TRACED = 3
PROGRAM = "from tests.simulation.runner import run_seed; print(*(run_seed(seed).trace for seed in range({})))"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_violated(seed: int) -> None:
    assert not run_seed(seed).violations


@pytest.mark.parametrize("seed", range(STANDBY_SEEDS))
def test_a_standby_takes_over(seed: int) -> None:
    assert not run_seed(seed, has_standby=True).violations


@pytest.mark.parametrize("seed", range(ADMINISTERED_SEEDS))
@pytest.mark.parametrize("has_standby", [False, True])
def test_engines_are_in_the_state_that_an_operator_wants(seed: int, has_standby: bool) -> None:
    """An operator pauses the mesh and puts it to sleep while engines and coordinators are killed."""
    assert not run_seed(seed, has_standby=has_standby, is_administered=True).violations


@pytest.mark.parametrize("seed", range(CHAT_SEEDS))
def test_helpers_that_die_cost_no_answer(seed: int) -> None:
    """Tokenizers, and the processes that render for them and compile for engines, die, are stopped, or do not start."""
    assert not run_seed(seed, has_chats=True).violations


@pytest.mark.parametrize("seed", range(STATE_SEEDS))
@pytest.mark.parametrize("is_administered", [False, True])
def test_states_follow_their_tokens(seed: int, is_administered: bool) -> None:
    """A state is a hash of all tokens before it: one that is stale, of others or written twice is a wrong token."""
    assert not run_seed(seed, has_states=True, is_administered=is_administered).violations


@pytest.mark.parametrize(
    "bug",
    ["stale_state", "twice_written_state", "wrong_state", "cut_state", "state_of_prompt", "loaded_over_hit"],
)
def test_a_bug_of_states_that_is_put_back_is_found(bug: str) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, has_states=True).violations for seed in range(200))


@pytest.mark.parametrize("seed", range(IMAGE_SEEDS))
def test_encoders_that_die_cost_no_answer(seed: int) -> None:
    """A row is a part of the hash of all tokens behind it: one of another image, or of none, is a wrong token."""
    assert not run_seed(seed, has_images=True).violations


@pytest.mark.parametrize("bug", ["blind_to_images", "lost_file_is_final", "rows_stay"])
def test_a_bug_of_images_that_is_put_back_is_found(bug: str) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, has_images=True).violations for seed in range(200))


def test_a_seed_with_images_repeats() -> None:
    assert len({run_seed(0, has_images=True).trace for _ in range(2)}) == 1


@pytest.mark.parametrize("bug", ["no_wait", "clients_fault", "schemas_fault"])
def test_a_bug_of_helpers_that_is_put_back_is_found(bug: str) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, has_chats=True).violations for seed in range(200))


@pytest.mark.parametrize("seed", range(MIGRATION_SEEDS))
def test_requests_that_move_lose_no_token(seed: int) -> None:
    """Requests move from engine to engine while these are killed and drained: one engine goes on, whichever dies."""
    assert not run_seed(seed, has_migrations=True, has_states=seed % 3 == 0, has_liars=seed % 4 == 1).violations


def test_many_requests_move_for_every_reason() -> None:
    results = [run_seed(seed, has_migrations=True) for seed in range(MIGRATION_SEEDS)]
    assert sum(result.num_migrations for result in results) > MIGRATION_SEEDS
    counted = sum((result.migrations for result in results), Counter[str]())
    assert counted.keys() >= {"operator", "drain", "rebalance", "preemption"}, counted


def test_blocks_that_are_read_too_early_are_found() -> None:
    with reintroduced("early_blocks"):
        assert any(run_seed(seed, has_migrations=True).violations for seed in range(200))


@pytest.mark.parametrize("seed", TOGETHER_SEEDS)
def test_parts_that_are_lost_together_cost_no_answer(seed: int) -> None:
    """A gateway and an output processor die in the same instant, or a whole host: the clients resume from copies."""
    assert not run_seed(seed, has_losses_together=True, has_states=seed % 4 == 0).violations


@pytest.mark.parametrize("seed", STUTTER_SEEDS)
def test_parts_that_are_stopped_again_and_again_cost_no_answer(seed: int) -> None:
    """Links break in any combination, and clients seek their requests while the gateways that have them are stopped."""
    assert not run_seed(seed, has_stutters=True).violations


@pytest.mark.parametrize(("first", "second"), list(combinations(REDRAWN, 2)))
def test_two_kinds_at_once_are_expected(first: str, second: str) -> None:
    for seed in (910000, 910002):
        assert not run_seed(seed, **{first: True, second: True}).violations


@pytest.mark.parametrize("victim", ["output_processor-0", "output_processor-1"])
def test_what_ends_while_its_client_is_away_outlives_an_output_processor(victim: str) -> None:
    """Killed alone, the one that had the answer took it along, although its copy had been complete."""
    plan, prompt = with_losses_together(make_plan(1, KINDS)), tuple(range(2, 12))
    ask = replace(
        plan.asks[0],
        at=0.0,
        prompt=prompt,
        max_tokens=40,
        stop=(),
        expected=expected(prompt, 40, ()),
        num_samples=1,
        cancel_after=None,
        patience=None,
        cut_after=0.3,
        away=4.0,
        timeout=60.0,
        is_chat=False,
    )
    faults = [Fault("crash", 2.5, 3.0, victim)]
    plan = replace(plan, roles=("both", "both"), num_output_processors=2, step_seconds=0.02, asks=[ask], faults=faults)
    result = run_plan(plan)
    assert (result.violations, result.outcomes) == ([], {"complete": 1})


def test_copies_are_resumed() -> None:
    used = sum((run_seed(seed, has_losses_together=True).copies_used for seed in TOGETHER_SEEDS), Counter[str]())
    assert used["resumed"] > len(TOGETHER_SEEDS) // 4


@pytest.mark.parametrize("bug", ["no_copies", "copied_twice"])
def test_a_bug_of_copies_that_is_put_back_is_found(bug: str) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, has_losses_together=True).violations for seed in range(100))


@pytest.mark.parametrize("seed", range(LIAR_SEEDS))
def test_processes_that_lie_cost_no_answer(seed: int) -> None:
    """Engines, output processors and tokenizers send invalid messages: others continue, with the right tokens."""
    assert not run_seed(seed, has_liars=True).violations


@pytest.mark.parametrize("seed", range(MOVER_SEEDS))
@pytest.mark.parametrize("has_chats", [False, True])
def test_clients_that_leave_slow_gateways_get_their_answers(seed: int, has_chats: bool) -> None:
    """They repeat a request under its key elsewhere, also when what was kept of it is forgotten."""
    assert not run_seed(seed, has_chats=has_chats, has_movers=True).violations


def test_clients_leave_gateways_that_learn_it_late() -> None:
    moves = sum((run_seed(seed, has_chats=True, has_movers=True).moves for seed in range(20)), Counter[str]())
    assert moves["gateways left"] > 100
    assert moves["answers taken"] > 0


def test_every_kind_of_process_lies() -> None:
    lies = sum((run_seed(seed, has_liars=True).lies for seed in range(LIAR_SEEDS)), Counter[str]())
    expected = ("EngineFrame", "ProcessFrame", "EngineInput", "EngineReport", "EncodeChatResponse", "Snapshot")
    assert {*expected, "PickResults"} <= {*lies}


def lying_owner(seed: int) -> Plan:
    return with_lying_owner(make_plan(seed, KINDS))


@pytest.mark.parametrize("seed", range(OWNER_SEEDS))
def test_an_owner_of_kv_that_lies_costs_no_answer(seed: int) -> None:
    """In a run with other liars too, no other engine often reads what it lies about."""
    assert not run_plan(lying_owner(seed)).violations


def test_an_owner_lies_about_its_blocks() -> None:
    lies = sum((run_plan(lying_owner(seed)).lies for seed in range(OWNER_SEEDS)), Counter[str]())
    assert {"AcquireResponse", "ReleaseResponse"} <= {*lies}


def test_a_lie_about_blocks_that_is_believed_is_found() -> None:
    with reintroduced("believed_blocks"):
        assert any(run_plan(lying_owner(seed)).violations for seed in range(200))


@pytest.mark.parametrize("bug", ["believed_tokens", "believed_prompts", "any_reason", "torn_loads"])
def test_a_lie_that_is_believed_is_found(bug: str) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, has_liars=True).violations for seed in range(200))


def test_requests_leave_no_reference_cycles() -> None:
    """Their memory does not wait for the garbage collector, which services seldom let look at all objects."""
    found: list[str] = []

    def collect() -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found.extend(str(type(each)) for each in gc.garbage if type(each).__module__.startswith("tokenloom."))
        gc.garbage.clear()

    result = run_plan(replace(make_plan(0, KINDS), faults=[]), collect)
    assert not result.violations
    assert result.outcomes["complete"] > 5
    assert found == []


def test_a_seed_takes_the_same_course_in_every_process() -> None:
    traces = [run_seed(seed).trace for seed in range(TRACED)]
    assert _traces_elsewhere(hash_seed="1") == traces
    assert len(set(traces)) == TRACED


def _traces_elsewhere(hash_seed: str) -> list[str]:
    """Return the traces of a process that hashes strings differently."""
    command = [sys.executable, "-c", PROGRAM.format(TRACED)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    root = Path(__file__).parent.parent.parent
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("bug", "faults", "first"),
    # What matters may be rare: of hangs seed 121 was the first, of cuts seed 60, and each takes a tenth of a second.
    [("no_retry", ("crash",), 0), ("stale_frames", ("hang",), 110), ("ignored_lease", ("cut",), 50)],
)
def test_a_bug_that_is_put_back_is_found(bug: str, faults: tuple[str, ...], first: int) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, faults).violations for seed in range(first, first + 200))


@pytest.mark.parametrize(("bug", "first"), [("forgotten_state", 0), ("state_of_one_life", 10), ("older_state", 20)])
def test_a_state_that_is_lost_is_found(bug: str, first: int) -> None:
    with reintroduced(bug):
        assert any(run_seed(seed, is_administered=True).violations for seed in range(first, first + 200))


def test_a_lease_that_is_kept_too_long_is_found() -> None:
    with reintroduced("kept_lease"):
        assert any(run_seed(seed, ("freeze",), has_standby=True).violations for seed in range(200))
