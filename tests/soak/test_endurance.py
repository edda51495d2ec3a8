"""What counts as growth; ``make soak`` runs two hours."""

from tests.soak.endurance import Sample, growth


def samples(*rss: float, descriptors: int = 40, threads: int = 9) -> list[Sample]:
    return [Sample(each, descriptors, threads) for each in rss]


def test_the_last_quarter_is_compared_with_the_first() -> None:
    flat = growth("engine-0", samples(80, 81, 120, 80, 81, 60, 82, 81), 1.0)
    assert (flat.before.rss, flat.after.rss, flat.is_kept) == (80.5, 81.5, True)
    assert flat.row() == "| engine-0 | 80 → 82 | 40 → 40 | 9 → 9 |"


def test_memory_may_grow_by_a_little_and_descriptors_by_open_connections() -> None:
    assert not growth("a", samples(*range(80, 160, 10)), 0.1).is_kept
    assert growth("a", samples(*range(80, 88)), 0.2).is_kept
    assert not growth("a", samples(80) + samples(80, descriptors=45), 1.0).is_kept
    assert not growth("a", samples(80) + samples(80, threads=11), 1.0).is_kept
    assert growth("a", samples(80) + samples(80, descriptors=44, threads=10), 1.0).is_kept
