"""A short form of ``python -m tests.soak.moves``: one request of each kind moves up to three times."""

from collections import Counter
from pathlib import Path

import pytest

from tests.soak.moves import MOVES, campaign

OPEN_ENDED = ("greedy ids", "logprobs", "penalties", "chat", "echo", "list of prompts", "batch file", "adapter")


@pytest.mark.parametrize("layout", ["whole", "split"])
async def test_requests_of_every_kind_move(socket_dir: Path, layout: str) -> None:
    async with campaign(socket_dir, layout=layout) as made:
        found = await made.run(0)
    assert not found.wrong
    assert "unknown" not in found.moves
    moving = [kind for kind, counts in found.moves.items() if counts.keys() - {"0"}]
    assert len(moving) >= 20, found.moves
    # On a busy machine a move may take so many tokens that the third one has no room.
    assert sum((found.moves[kind] for kind in OPEN_ENDED), Counter[str]())[str(MOVES)] > 0, found.moves
    assert found.pauses
