"""A short form of ``python -m tests.soak.waves``."""

from pathlib import Path

import pytest

from tests.engine_core.data_parallel.cores import Group
from tests.soak.waves import soak


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_rank_is_busy_while_the_other_is_idle(socket_dir: Path, overlaps: bool) -> None:
    group = Group(socket_dir, num_blocks=1024, async_scheduling=overlaps, num_drafts=3 * overlaps)
    soak(group, 300)
    assert len(group.ended) == 300
    assert group.num_waves >= 2
