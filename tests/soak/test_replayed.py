"""A short form of ``python -m tests.soak.replayed``."""

from pathlib import Path

import pytest

from tests.soak.replayed import DRAFTS, KINDS, Round, report, run_round


async def test_requests_with_drafts_are_computed_again_one_by_one(socket_dir: Path) -> None:
    number = KINDS.index({"dtype": "float32", **DRAFTS})
    found = await run_round(number, socket_dir, size=12)
    assert not found.different
    assert found.requests >= 20
    assert found.replayed > 15
    assert found.tokens > 400


def test_a_difference_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Round(0, "a", requests=3, replayed=3), Round(1, "a", requests=2, replayed=1)]) == 0
    assert "5 requests, 4 computed again one by one, 0 differ" in capsys.readouterr().out
    assert report([Round(0, "a", requests=3, replayed=3, different=["x: token 4"])]) == 1
    assert "! x: token 4" in capsys.readouterr().out
