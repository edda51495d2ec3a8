from tokenloom.engine_core.data.draft_counts import PROBE_TOKENS, DraftHistory


def test_a_request_whose_last_32_drafts_were_right_in_fewer_than_a_quarter_gets_none() -> None:
    history = DraftHistory()
    for _ in range(7):
        history.add(1, 1, 10)
    for _ in range(24):
        history.add(1, 0, 10)
        assert history.allows(10)
    history.add(1, 0, 10)
    assert not history.allows(10)
    assert not history.allows(9 + PROBE_TOKENS)
    assert history.allows(10 + PROBE_TOKENS)


def test_a_quarter_is_enough() -> None:
    history = DraftHistory()
    for _ in range(20):
        for num_right in (1, 0, 0, 0):
            history.add(1, num_right, 10)
            assert history.allows(10)


def test_only_the_last_32_drafts_count() -> None:
    history = DraftHistory()
    for _ in range(100):
        history.add(6, 6, 10)
    for _ in range(24):
        history.add(1, 0, 10)
    assert history.allows(10)
    history.add(1, 0, 10)
    assert not history.allows(10)


def test_drafts_after_a_wrong_one_do_not_count() -> None:
    history = DraftHistory()
    for _ in range(100):
        history.add(6, 1, 10)  # one right, one wrong, four that nothing was drawn for
    assert history.allows(10)


def test_a_probe_decides_at_once() -> None:
    history = DraftHistory()
    for _ in range(32):
        history.add(1, 0, 10)
    history.add(6, 0, 100)
    assert not history.allows(100)
    history.add(6, 2, 200)
    assert history.allows(200)
    for _ in range(31 - 3):
        history.add(1, 0, 200)
        assert history.allows(200)
    history.add(1, 0, 200)
    assert not history.allows(200)
