from pathlib import Path

from tests.soak.fuzz import fuzz


async def test_nonsense_is_refused_and_disturbs_nobody(socket_dir: Path) -> None:
    seen = await fuzz(socket_dir, range(400))
    assert seen["200"] > 2, seen
    assert seen["400"] > 100, seen
    assert seen["INVALID_ARGUMENT"] > 10, seen
    assert seen["431"] > 5, seen
    assert seen["own prompts found"] > 0, seen
