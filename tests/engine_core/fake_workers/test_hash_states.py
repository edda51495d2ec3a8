"""The states of the hash worker: equal for equal tokens and cuts, and another one for any other slot."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, SchedulerOutput, StateRun
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES, HashRow, HashStates, hash_run

TOKENS = np.column_stack((np.arange(150), np.arange(150))).astype(np.int32)


def cut(*ends: int, chunk: int) -> bytes:
    state = b""
    for begin, end in pairwise((0, *ends, len(TOKENS))):
        state = hash_run(state, TOKENS[begin:end], chunk)
    return state


def test_cuts_matter_only_within_chunks() -> None:
    assert cut(37, 101, chunk=1) == cut(chunk=1) == cut(*range(1, 150), chunk=1)
    assert cut(64, 128, chunk=64) == cut(chunk=64)
    assert cut(37, chunk=64) != cut(chunk=64)
    assert cut(149, chunk=64) != cut(chunk=64), "a prompt's last token alone takes the other form"


def run_step(states: HashStates, cache: npt.NDArray[np.int32], counts: dict[str, int], runs: list[StateRun]) -> None:
    rows = {}
    for req_id, count in counts.items():
        rows[req_id] = row = HashRow(req_id, list(range(150)), count, CoreSamplingParams(max_tokens=1, seed=0), 150)
        row.add_blocks([0])
    step = SchedulerOutput([], CachedRequestData([], [], [], {}), counts, sum(counts.values()), [], [], state_runs=runs)
    states.compute(step, rows, cache)


def test_a_run_keeps_the_slot_that_it_reads() -> None:
    states = HashStates(1)
    states.allocate(3)
    run_step(states, TOKENS, {"a": 40}, [StateRun("a", 32, -1, 0), StateRun("a", 8, 0, 2)])
    kept = [hash_run(b"", TOKENS[:32], 1), b"\xee" * STATE_BYTES, hash_run(b"", TOKENS[:40], 1)]
    assert [slot.tobytes() for slot in states.slots] == kept


@pytest.mark.parametrize(
    "runs",
    [
        [StateRun("a", 5, -1, 0), StateRun("b", 5, -1, 0)],
        [StateRun("a", 2, -1, 0), StateRun("a", 3, 0, 1), StateRun("b", 2, -1, 2), StateRun("b", 3, 0, 2)],
        [StateRun("b", 5, -1, 0), StateRun("a", 5, -1, 1)],
        [StateRun("a", 4, -1, 0), StateRun("b", 5, -1, 1)],
        [StateRun("a", 5, 1, 0), StateRun("b", 5, -1, 2)],
    ],
    ids=["written twice", "read while it is written", "other order", "other tokens", "begins from a state"],
)
def test_steps_that_kernels_could_not_compute_are_found(runs: list[StateRun]) -> None:
    states = HashStates(1)
    states.allocate(3)
    with pytest.raises(AssertionError):
        run_step(states, TOKENS, {"a": 5, "b": 5}, runs)
