"""The benchmark of picks measures picks that share beginnings, and engines that stay alive."""

import pytest

from tokenloom.bench.scale import pick_load, picks


def test_prompts_share_beginnings_and_end_in_blocks_of_their_own() -> None:
    asked = pick_load.requests(3000, 8)
    hashes = [tuple(each.block_hash_prefixes) for each in asked]
    assert {len(each) for each in hashes} == {8}
    assert len({each[0] for each in hashes}) < 2000
    assert len({each[-1] for each in hashes}) > 2400
    assert not pick_load.requests(1, 0)[0].block_hash_prefixes


def test_costs_and_memory_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "_NUM_PICKS", 20)
    monkeypatch.setattr(picks, "_PICKS_OF_A_ROUND", 5)
    cost = picks.pick_cost(3)
    assert 0 < cost.without_hashes < cost.with_hashes
    monkeypatch.setattr(picks, "_MEMORY_PICKS", 50)
    memory = picks.index_memory(3)
    assert memory.empty > 0
    assert memory.full > 0
