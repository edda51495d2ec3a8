import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tokenloom.process.uncollected_imports import uncollected_imports


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of garbage collections while the test runs."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_nothing_is_collected_within_and_what_was_made_is_frozen(collections: list[str]) -> None:
    with uncollected_imports():
        before, collections[:] = gc.get_freeze_count(), []
        made = [[index] for index in range(20 * gc.get_threshold()[0])]
        assert collections == []
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_a_collector_that_is_off_stays_off() -> None:
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with uncollected_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() <= frozen


@pytest.mark.parametrize("module", ["tokenloom.services.coordinator.__main__", "tokenloom.cli.main"])
def test_processes_start_without_collections(module: str) -> None:
    code = (
        f"import gc, {module}; print(gc.get_freeze_count() > 10_000, gc.isenabled(), gc.get_stats()[2]['collections'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True", "0"]
