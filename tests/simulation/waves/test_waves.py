"""The waves of a data-parallel group over random schedules; ``make simulate`` runs 20,000 of them."""

from collections import Counter

import pytest

from tests.simulation.waves import group
from tests.simulation.waves.schedule import KINDS, run_seed
from tokenloom.engine_core.data_parallel.messages import Want
from tokenloom.engine_core.data_parallel.wave_loop import Waves, WaveState


def test_every_request_has_an_outcome_and_every_pause_is_complete() -> None:
    outcomes: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    for seed in range(300):
        result = run_seed(seed)
        assert not result.violations, f"seed {seed}: {result.violations}"
        outcomes += result.outcomes
        happened += result.happened
    assert outcomes.keys() == {"served", "TRY_ELSEWHERE"}
    assert happened.keys() >= {*KINDS, "stale start ignored", "lost while joining"}, "the schedules show everything"


def test_a_lost_start_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Waves.call

    def forgetful(waves: Waves) -> None:
        """A start that comes before the outcome of the last vote is dropped."""
        if waves.state is not WaveState.VOTING:
            call(waves)

    monkeypatch.setattr(Waves, "call", forgetful)
    assert any(run_seed(seed).violations for seed in range(300))


def test_a_pause_without_consensus_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(rank: group.Rank) -> Want:
        """A paused rank votes like an idle one, and is made to compute although it may sleep."""
        return Want.RUN if rank.requests and not rank.is_paused else Want.IDLE

    monkeypatch.setattr(group, "_want", careless)
    assert any(run_seed(seed).violations for seed in range(300))
