"""A short form of ``python -m tests.soak.waves``."""

from pathlib import Path

from tests.soak.waves import soak


def test_one_rank_is_busy_while_the_other_is_idle(socket_dir: Path) -> None:
    group = soak(socket_dir, 300)
    assert len(group.ended) == 300
    assert group.num_waves >= 2
