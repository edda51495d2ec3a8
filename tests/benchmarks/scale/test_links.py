"""Tests the comparison of subsets with all-to-all on a small mesh."""

import pytest

from tokenloom.bench.scale.links import (
    BLOCK_SIZE,
    CACHED_PREFIXES,
    PREFIX_BLOCKS,
    Case,
    FakeEngine,
    Result,
    Simulation,
    show,
)


def run(size: int | None, seed: int = 1) -> tuple[Case, Result]:
    case = Case(engines=60, output_processors=12, size=size, load=0.5, seconds=0.5, seed=seed)
    return case, Simulation(case).run()


def test_subsets_need_few_links_and_fill_frames() -> None:
    everywhere, few = run(None), run(20)
    assert few[1].links <= 60 * 4, "each engine is in four subsets"
    assert everywhere[1].links > few[1].links
    assert everywhere[1].rows_per_frame < 64 / 10
    assert few[1].rows_per_frame == pytest.approx(64 / 4, rel=0.1)
    assert len(few[1].ttfts) == pytest.approx(60 * 64 / (256 * 0.02) * 0.5, rel=0.3)
    assert show([everywhere, few]).row_count == 2


def test_a_seed_has_one_course() -> None:
    assert run(20) == run(20)
    assert run(20)[1].ttfts != run(20, seed=2)[1].ttfts


def test_an_engine_keeps_the_prefixes_that_it_used_last() -> None:
    engine = FakeEngine(record=None)  # type: ignore[arg-type]
    whole = PREFIX_BLOCKS * BLOCK_SIZE
    assert [engine.uncached(prefix) for prefix in (None, 1, 1)] == [0, whole, 0]
    assert sum(engine.uncached(prefix) for prefix in range(2, 1 + CACHED_PREFIXES)) == whole * (CACHED_PREFIXES - 1)
    assert [engine.uncached(prefix) for prefix in (1, 1000, 1, 2)] == [0, whole, 0, whole]


def test_requests_that_share_prefixes_are_placed_where_they_are_kept() -> None:
    case = Case(engines=20, output_processors=4, size=10, load=0.3, seconds=0.3, seed=1, prefixes=50)
    simulation = Simulation(case)
    assert simulation.run().ttfts
    kept = sum(len(engine.prefixes) for engine in simulation._engines)
    assert kept < 50 * 20 / 2, "not every engine computes every prefix"
