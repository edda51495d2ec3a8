"""Objectives and who meets them."""

import pytest

from tokenloom.bench.load.events import Outcome
from tokenloom.bench.load.slo import Objectives


def test_texts_may_hold_several() -> None:
    wanted = {"ttft": 500.0, "tpot": 50.0, "e2el": 5000.0}
    assert Objectives.parse(["ttft:500", "tpot:50 e2el:5000"]).bounds == wanted
    assert Objectives.parse(["ttft:500,tpot:50,e2el:5e3"]).bounds == wanted
    assert Objectives.parse([]).bounds == {}


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:", "ttft:soon", "500"])
def test_bad_texts_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        Objectives.parse([text])


@pytest.mark.parametrize(
    ("ttft", "latency", "met"), [(0.5, 1.5, True), (0.501, 1.5, False), (0.5, 1.6, False), (0.1, 1.1, True)]
)
def test_all_bounds_must_be_kept(ttft: float, latency: float, met: bool) -> None:
    outcome = Outcome(0.0, output_tokens=11, ttft=ttft, latency=latency)
    assert Objectives({"ttft": 500.0, "tpot": 100.0 + 1e-6}).met_by(outcome) is met


def test_a_single_token_keeps_any_time_per_token() -> None:
    assert Objectives({"tpot": 0.001}).met_by(Outcome(0.0, output_tokens=1, ttft=1.0, latency=1.0))
