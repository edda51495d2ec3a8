"""Some schedules of faults; ``make soak`` runs many times as many."""

from collections import Counter
from pathlib import Path

import pytest

from tests.soak.plan import OWNER_FAULTS, READER_FAULTS
from tests.soak.run import soak

EVENTS = ("kill prefill", "kill decode", "cut prefill")
SEEDS = (1, 10, 12, 14, 17, 19, 24, 25, 36, 37, 44, 47, 48, 52, 55, 74, 78, 79, 80, 83, 85, 97)
"""Few, and yet each fault and each event happens in more than one of their schedules."""


async def test_no_wrong_token_no_leaked_block_no_hang(socket_dir: Path) -> None:
    seen: Counter[str] = Counter()
    for async_scheduling in (False, True):
        async for _, happened in soak(socket_dir, SEEDS[async_scheduling::2], async_scheduling=async_scheduling):
            seen += happened
    print(dict(sorted(seen.items())))
    assert not [name for name in (*OWNER_FAULTS, *READER_FAULTS, *EVENTS) if not seen[name]], "these never happened"
    assert seen["answered"] > 2 * len(SEEDS)


async def test_workers_in_processes_of_their_own_say_the_same(socket_dir: Path) -> None:
    seen: Counter[str] = Counter()
    for async_scheduling in (False, True):
        async for _, happened in soak(socket_dir, SEEDS[:2], executor="mp", async_scheduling=async_scheduling):
            seen += happened
    assert seen["answered"] > 5


@pytest.mark.parametrize("async_scheduling", [False, True])
async def test_a_real_model_says_the_same(socket_dir: Path, async_scheduling: bool) -> None:
    seen: Counter[str] = Counter()
    async for _, happened in soak(socket_dir, range(3), worker="model", async_scheduling=async_scheduling):
        seen += happened
    assert seen["answered"] > 5
