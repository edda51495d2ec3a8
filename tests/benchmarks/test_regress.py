"""Two checkouts in turns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from tokenloom.bench import regress
from tokenloom.bench.peers.compare import PeerFailed
from tokenloom.bench.regress import Measure, RegressOptions, Turns, decide, named, run_regress, table
from tokenloom.bench.report.paired import Verdict
from tokenloom.model_files.model_path import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]
BATCH = RegressOptions(DEMO_MODEL, ROOT, ROOT, ("batch",))


def trees(*, ours: float, noise: float, second: float = 1.0, seed: int = 1) -> Measure:
    """Stand for two trees. ``ours``: the speed of our tree beside the base's; ``noise``: of a turn, as a share;
    ``second``: the speed of a tree that runs right after the other one."""
    random = Random(seed)

    def turn(speed: float) -> dict[str, float]:
        figure = 100.0 * speed * random.lognormvariate(0.0, noise)
        return {"output_tokens_per_second": figure, "ttft_ms": 1e3 / figure}

    def measure(number: int, cases: Sequence[str]) -> Mapping[str, Turns]:
        slowed = {"base": [1.0, second], "ours": [second, 1.0]}
        turns = {
            "base": [turn(each) for each in slowed["base"]],
            "ours": [turn(ours * each) for each in slowed["ours"]],
        }
        return dict.fromkeys(cases, turns)

    return measure


def test_both_trees_start_afresh_and_run_as_often_first_as_second(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, str]] = []
    options = RegressOptions(DEMO_MODEL, ROOT, ROOT, ("shared-prefix",), rounds=1, most_rounds=1, threads=1)
    monkeypatch.setattr(regress, "_CASE_SECONDS", 0.0)
    report = run_regress(options, lambda case, tree: heard.append((case, tree)))
    assert heard == [("shared-prefix", tree) for tree in ("base", "ours", "ours", "base")]
    (row,) = report["figures"]
    assert (row["case"], row["figure"], row["rounds"]) == ("shared-prefix", "requests_per_second", 1)
    assert row["base"] > 0
    assert row["verdict"] == Verdict.UNDECIDED, "one round says nothing"
    assert table(report).row_count == 1


def test_each_tree_runs_its_own_code(tmp_path: Path) -> None:
    package = tmp_path / "tokenloom"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this is the other tree')\n")
    with pytest.raises(PeerFailed, match=r"base ended with status 1\n.*this is the other tree"):
        run_regress(RegressOptions(DEMO_MODEL, tmp_path, ROOT, ("batch",)), lambda *_: None)


def test_a_tree_is_no_slower_than_itself() -> None:
    for seed in range(50):
        (row,) = decide(BATCH, trees(ours=1.0, noise=0.03, second=0.9, seed=seed))
        assert row["verdict"] != Verdict.SLOWER


def test_a_slower_tree_is_found() -> None:
    (row,) = decide(BATCH, trees(ours=0.94, noise=0.01))
    assert row["verdict"] == Verdict.SLOWER
    assert row["high"] < 1 / 1.03
    assert named({"figures": [row]}, Verdict.SLOWER) == ["batch output_tokens_per_second"]


def test_a_burst_that_hits_one_turn_of_a_round_does_not_count() -> None:
    def measure(number: int, cases: Sequence[str]) -> Mapping[str, Turns]:
        base = [{"output_tokens_per_second": 100.0}] * 6
        ours = [{"output_tokens_per_second": speed} for speed in (99.0, 99.0, 30.0, 99.0, 99.0, 99.0)]
        return {"batch": {"base": base, "ours": ours}}

    (row,) = decide(BATCH, measure)
    assert (row["low"], row["high"], row["verdict"]) == (0.99, 0.99, Verdict.HOLDS)


def test_a_longer_time_is_slower() -> None:
    options = RegressOptions(DEMO_MODEL, ROOT, ROOT, ("long-prompt",))
    (row,) = decide(options, trees(ours=0.9, noise=0.01))
    assert (row["figure"], row["verdict"]) == ("ttft_ms", Verdict.SLOWER)


def test_rounds_follow_until_a_figure_is_decided_or_has_had_its_most() -> None:
    (quiet,) = decide(BATCH, trees(ours=1.0, noise=0.001))
    (loud,) = decide(BATCH, trees(ours=1 / 1.03, noise=0.2))
    assert (quiet["rounds"], quiet["verdict"]) == (BATCH.rounds, Verdict.HOLDS)
    assert (loud["rounds"], loud["verdict"]) == (BATCH.most_rounds, Verdict.UNDECIDED)


def test_a_decided_case_is_not_run_again() -> None:
    quiet, loud = trees(ours=1.0, noise=0.001), trees(ours=1 / 1.03, noise=0.2)
    asked: list[Sequence[str]] = []

    def measure(number: int, cases: Sequence[str]) -> Mapping[str, Turns]:
        asked.append(cases)
        return {case: (loud if case == "batch" else quiet)(number, [case])[case] for case in cases}

    options = RegressOptions(DEMO_MODEL, ROOT, ROOT, ("long-prompt", "batch"), most_rounds=8)
    decide(options, measure)
    assert asked == [["long-prompt", "batch"]] * 6 + [["batch"]] * 2
