"""The measurement of starts: turns, medians, and the limit."""

from pathlib import Path

import pytest

from tools.start_cpu import compare, main, processor_seconds

BASE, OURS = Path("base"), Path("ours")


def test_both_trees_take_turns_and_the_first_start_does_not_count() -> None:
    asked: list[Path] = []

    def measure(tree: Path, service: str) -> float:
        asked.append(tree)
        return 9.0 if len(asked) <= 2 else 1.0 + (tree == OURS)

    assert compare((BASE, OURS), "gateway", 2, measure) == (1.0, 2.0)
    assert asked == [BASE, OURS, *[BASE, OURS, OURS, BASE] * 2]


@pytest.mark.parametrize(("more", "status"), [(0.019, 0), (0.021, 1)])
def test_the_limit(more: float, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(tree: Path, service: str) -> float:
        return 0.5 + (more if tree == OURS and service == "engine" else 0.0)

    arguments = ["--base", "base", "--ours", "ours", "--rounds", "1"]
    assert main(arguments, measure) == status
    assert f"engine: 500 ms, {500 + 1000 * more:.0f} ms" in capsys.readouterr().out


def test_a_measurement_that_could_not_fail_is_none() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--base", "base", "--rounds", "0"], lambda _, __: 0.5)
    assert main(["--base", "base", "--rounds", "1", "--limit", "nan"], lambda _, __: 0.5) == 1


def test_a_start_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no_such of .* ended with status 1"):
        processor_seconds(Path(__file__).parents[2], "no_such", tmp_path)
