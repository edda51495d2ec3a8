"""Where prompts with popular beginnings were placed, as far as the coordinator remembers it."""

from tokenloom.services.coordinator.picks.prefix_placements import MAX_CHANGES, MAX_PREFIXES, PrefixPlacements


def prompt(shared: int, own: int, count: int = 100) -> list[int]:
    """Hashes of a prompt that shares its first 70 blocks with others."""
    return [shared * 1_000_000 + block for block in range(70)] + [own * 1000 + block for block in range(70, count)]


def test_the_last_two_engines_of_a_beginning_are_kept() -> None:
    placements = PrefixPlacements()
    for own, engine in enumerate(["a", "a", "b", "c", "c"]):
        placements.note(prompt(1, own), engine)
    hashes = prompt(1, 0)
    known = dict(placements.all())
    assert known[hashes[15]] == known[hashes[63]] == ("c", "b")
    assert hashes[99] not in known, "the whole prompt came once"


def test_only_the_shortest_beginning_is_sent_of_a_prompt_that_came_once() -> None:
    placements = PrefixPlacements()
    placements.note(prompt(1, 1), "a")
    assert dict(placements.all()) == dict(placements.take_changed()) == {prompt(1, 1)[15]: ("a",)}
    assert not dict(placements.take_changed())
    placements.note(prompt(1, 2), "a")
    assert set(dict(placements.take_changed())) == {prompt(1, 1)[15], prompt(1, 1)[63]}
    placements.note(prompt(1, 3), "a")
    assert not dict(placements.take_changed()), "nothing has changed"


def test_what_is_kept_and_sent_is_bounded_and_popular_beginnings_stay() -> None:
    placements = PrefixPlacements()
    for own in range(3 * MAX_PREFIXES):
        placements.note(prompt(own, own), "b")
        if own % 100 == 0:
            placements.note(prompt(-1, own), "a")
    assert len(list(placements.all())) <= 2 * MAX_PREFIXES
    assert dict(placements.all())[prompt(-1, 0)[15]] == ("a",)
    assert len(list(placements.take_changed())) <= MAX_CHANGES
    while list(placements.take_changed()):
        pass
    placements.note(prompt(-1, 0), "b")
    assert (prompt(-1, 0)[15], ("b", "a")) in list(placements.take_changed())
