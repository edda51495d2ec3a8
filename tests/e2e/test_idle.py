"""A mesh without requests leaves the processors alone."""

from typing import Any

import pytest

from tests.e2e.idle import MOST_CORES, SHAPES, ask, idle_cores

SECONDS = 2.0
ATTEMPTS = 8
"""The first windows may still see start-up work; what spins is seen in all of them."""


@pytest.mark.parametrize("shape", SHAPES)
def test_an_idle_mesh_uses_less_than_a_tenth_of_a_core(serve: Any, shape: str) -> None:
    served = serve("--worker", "hash", *SHAPES[shape])
    ask(served)
    for _ in range(ATTEMPTS):
        cores = idle_cores(served, SECONDS)
        if sum(cores.values()) < MOST_CORES:
            return
    pytest.fail(f"{shape}: {sum(cores.values()):.2f} cores: {cores}")
