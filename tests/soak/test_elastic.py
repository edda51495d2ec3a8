"""A short form of ``python -m tests.soak.elastic``."""

from tests.soak.elastic import run_shard


def test_a_group_grows_loses_a_rank_and_shrinks_while_it_serves() -> None:
    assert run_shard(0, 80, experts=False) == {"shard": 0, "requests": 80, "resizes": 2, "deaths": 1}
