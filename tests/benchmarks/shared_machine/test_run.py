"""The figures of `bench shared`, with an engine whose rates the test knows."""

from contextlib import nullcontext
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tokenloom.bench.shared_machine import run
from tokenloom.bench.shared_machine.run import SharedOptions, run_shared, table


class Engine:
    """Generates as many tokens/s as there are requests, times what the case leaves of the machine."""

    left = 1.0
    pid = 7

    def __init__(self, options: SharedOptions) -> None:
        self.asked: list[tuple[int, int]] = []

    def measure(self, requests: int, tokens: int, seconds: float) -> float:
        return 100.0 * requests * Engine.left

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Disturbance:
    """Leaves a share of the machine while it lasts."""

    def __init__(self, left: float) -> None:
        self._left = left

    def __enter__(self) -> None:
        Engine.left = self._left

    def __exit__(self, *_: object) -> None:
        Engine.left = 1.0


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Engine", Engine)
    monkeypatch.setattr(run, "hogs", lambda count: Disturbance(1 / count) if count else nullcontext())
    monkeypatch.setattr(run, "cpu_quota", lambda pid, cores: Disturbance(cores / 4))


def measured(**chosen: Any) -> dict[str, Any]:
    return run_shared(SharedOptions("demo", turns=2, **chosen))


def test_shares_of_the_quiet_rate() -> None:
    first, second = measured(hogs=2, quota=3.0)["cases"]
    assert first == {
        "requests": 1,
        "quiet": 100.0,
        "hogs": 50.0,
        "quota": 75.0,
        "hogs_kept": 0.5,
        "quota_kept": 0.75,
    }
    assert second["requests"] == 32
    assert second["hogs_kept"] == 0.5


def test_only_what_was_asked_for_is_measured_and_shown() -> None:
    report = measured(hogs=0, requests=(4,))
    assert report["cases"] == [{"requests": 4, "quiet": 400.0}]
    text = StringIO()
    Console(file=text, width=100).print(table(report))
    assert "400" in text.getvalue()
    assert "busy" not in text.getvalue()


def test_the_table_names_the_disturbances() -> None:
    text = StringIO()
    Console(file=text, width=100).print(table(measured(hogs=4, quota=1.0, requests=(1,))))
    for words in ("4 busy loops", "1 cores", "25 (25%)"):
        assert words in text.getvalue()
