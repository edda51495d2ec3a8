"""The count of instructions: what is read of valgrind's report, and what becomes of it."""

import json
from pathlib import Path

import pytest

from tokenloom.bench.engine import step_instructions

REPORT = "==77== Cachegrind\n==77== \n==77== I   refs:      6,073,221,948\n"


def test_the_total_is_read_from_the_report():
    assert step_instructions.read_total(REPORT) == 6_073_221_948
    with pytest.raises(RuntimeError, match="no instructions"):
        step_instructions.read_total("==77== I am sorry\n")


def test_set_up_does_not_count(monkeypatch, capsys):
    """Each tree's imports take what they take; a step of ours takes 2 % more."""

    def count(tree: Path, rows: int, sampling: str, steps: int) -> int:
        return {"base": 9_000 + 100 * steps, "ours": 50_000 + 102 * steps}[tree.name]

    monkeypatch.setattr(step_instructions, "count", count)
    arguments = ["--base", "base", "--ours", "ours", "--rows", "32", "--sampling", "greedy"]
    assert step_instructions.main(arguments) == 1
    assert json.loads(capsys.readouterr().out) == {
        "rows": 32, "sampling": "greedy", "base": 100, "ours": 102, "ratio": 1.02
    }  # fmt: skip
    assert step_instructions.main([*arguments, "--limit", "0.03"]) == 0


@pytest.mark.parametrize(("per_step", "status"), [(1004, 0), (1006, 1)])
def test_half_a_percent_is_the_limit(per_step: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(tree: Path, rows: int, sampling: str, steps: int) -> int:
        return {"base": 1000, "ours": per_step}[tree.name] * steps

    monkeypatch.setattr(step_instructions, "count", count)
    arguments = ["--base", "base", "--ours", "ours", "--rows", "32", "--sampling", "greedy"]
    assert step_instructions.main(arguments) == status


def test_without_valgrind_it_says_so(monkeypatch):
    monkeypatch.setattr(step_instructions, "_VALGRIND", ("/nowhere/valgrind",))
    with pytest.raises(RuntimeError, match="not installed"):
        step_instructions.count(Path(__file__).parents[3], 1, "greedy", 1)
