from pathlib import Path

from tests.soak.fuzz import fuzz


async def test_nonsense_is_refused_and_disturbs_nobody(socket_dir: Path) -> None:
    seen = await fuzz(socket_dir, range(400))
    assert seen["200"] > 5, seen
    assert seen["400"] > 100, seen
    assert seen["INVALID_ARGUMENT"] > 10, seen
