"""Two checkouts in turns."""

from pathlib import Path

import pytest

from tokenloom.bench.peers.compare import PeerFailed
from tokenloom.bench.regress import RegressOptions, regressions, run_regress, table
from tokenloom.model_path import DEMO_MODEL

ROOT = Path(__file__).resolve().parents[2]


def test_both_trees_run_one_right_after_the_other() -> None:
    heard: list[tuple[str, str]] = []
    options = RegressOptions(DEMO_MODEL, ROOT, ROOT, ("shared-prefix",), rounds=1, threads=1)
    report = run_regress(options, lambda case, tree: heard.append((case, tree)))
    assert heard == [("shared-prefix", tree) for tree in ("ours", "base", "base", "ours")]
    (row,) = report["figures"]
    assert (row["case"], row["figure"]) == ("shared-prefix", "requests_per_second")
    assert row["ratio"] == pytest.approx(row["ours"] / row["base"], rel=0.01)
    assert table(report).row_count == 1


def test_each_tree_runs_its_own_code(tmp_path: Path) -> None:
    package = tmp_path / "tokenloom"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this is the other tree')\n")
    with pytest.raises(PeerFailed, match=r"base ended with status 1\n.*this is the other tree"):
        run_regress(RegressOptions(DEMO_MODEL, tmp_path, ROOT, ("batch",)), lambda *_: None)


def test_a_figure_that_is_worse_by_more_than_the_limit_is_named() -> None:
    figures = [
        {"case": "batch", "figure": "output_tokens_per_second", "base": 100.0, "ours": 96.0, "ratio": 0.96},
        {"case": "server", "figure": "median_itl_ms", "base": 10.0, "ours": 10.2, "ratio": 0.98},
    ]
    assert regressions({"figures": figures}, 0.03) == ["batch output_tokens_per_second"]
