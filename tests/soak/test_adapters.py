"""One schedule of changing adapters; ``make soak`` runs many."""

from pathlib import Path

from tests.soak.adapters import soak


async def test_no_request_is_answered_by_a_wrong_adapter(socket_dir: Path) -> None:
    seen = await soak(socket_dir, seed=1, num_requests=120)
    print(dict(sorted(seen.items())))
    assert seen["adapter answered"] > 10
    assert seen["base model answered"] > 10
    assert seen["change 200"] > 5
