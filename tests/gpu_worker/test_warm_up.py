from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tokenloom.gpu_worker.warm_up import free_rows, is_small_step, num_differing_layers


class Machine:
    """A clock that steps advance: ``base`` seconds, and ``per_row`` for each row beyond ``cheap`` ones."""

    def __init__(self, base: float, per_row: float, cheap: int) -> None:
        self.base, self.per_row, self.cheap = base, per_row, cheap
        self.now = 0.0
        self.delays: list[float] = []
        self.counts: list[int] = []

    def run(self, num_rows: int) -> None:
        self.counts.append(num_rows)
        self.now += self.base + self.per_row * max(0, num_rows - self.cheap) + (self.delays.pop() if self.delays else 0)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("per_row", "cheap", "most", "expected"),
    [(0.0, 0, 100, 64), (0.0, 0, 20, 16), (3.0, 0, 100, 1), (1.0, 8, 100, 8), (0.05, 1, 100, 8)],
)
def test_rows_are_free_while_a_step_takes_hardly_longer(per_row: float, cheap: int, most: int, expected: int) -> None:
    machine = Machine(1.0, per_row, cheap)
    assert free_rows(machine.run, most, machine.clock) == expected
    assert max(machine.counts) <= most
    assert all(count <= following for count, following in pairwise(machine.counts))


def test_a_delay_of_some_steps_changes_nothing() -> None:
    machine = Machine(1.0, 1.0, 8)
    machine.delays = [9.0, 9.0, 9.0, 9.0, 0.0, 0.0, 0.0, 0.0, 9.0, 0.0, 9.0, 9.0]
    assert free_rows(machine.run, 100, machine.clock) == 8


@pytest.mark.parametrize(
    ("windows", "experts", "expected"),
    [
        ((None,), None, 3),
        ((None,) * 6, None, 3),
        ((8, 8, 8, None, 8), None, 4),
        ((None, 8, 8), None, 3),
        ((8, 4, None), None, 3),
        ((None,) * 6, (False, False, False, True, True, True), 4),
        ((None,) * 6, (True,) * 6, 3),
    ],
)
def test_the_profiled_layers_include_every_kind(
    windows: tuple[int | None, ...], experts: tuple[bool, ...] | None, expected: int
) -> None:
    switches = None if experts is None else SimpleNamespace(layers=experts)
    config: Any = SimpleNamespace(mixer=None, sliding_windows=windows, experts=switches)
    assert num_differing_layers(config) == expected


def test_all_layers_are_profiled_if_some_keep_a_state() -> None:
    """Those with KV count: in between are all layers that keep a state."""
    assert num_differing_layers(SimpleNamespace(mixer=object(), num_layers=8)) == 8


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "expected"), [(3, 256, True), (6, 256, False), (3, 1024, False), (28, 4096, False)]
)
def test_one_thread_is_for_tiny_models(num_layers: int, hidden_size: int, expected: bool) -> None:
    assert is_small_step(2048, num_layers, hidden_size) is expected
