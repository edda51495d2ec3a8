"""Tests the comparison of subsets with all-to-all on a small mesh."""

import pytest

from tokenloom.bench.scale.links import Case, Result, Simulation, show


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
