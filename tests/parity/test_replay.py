"""Two hundred random requests of a mesh with prefix hits, preemption and two engines for each come again."""

from pathlib import Path

import pytest

from tests.mesh.recorded import check_replay, record


@pytest.mark.parametrize(
    ("dtype", "batch_invariant"),
    [("float32", False), ("float32", True), ("bfloat16", True)],
    ids=["by batch", "batch invariant", "batch invariant in bfloat16"],
)
async def test_random_requests_come_again(socket_dir: Path, tmp_path: Path, dtype: str, batch_invariant: bool) -> None:
    """Of batch-invariant engines also every bit of the log probabilities."""
    folder = tmp_path / "records"
    outcomes = await record(socket_dir, folder, range(6000, 6200), dtype=dtype, batch_invariant=batch_invariant)
    await check_replay(folder, outcomes)
