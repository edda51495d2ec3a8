"""Which engines share a store."""

from tokenloom.services.runtime.placement.engine_columns import EngineColumns


def test_engines_of_one_store_have_its_number() -> None:
    columns = EngineColumns()
    rows = [columns.add() for _ in range(4)]
    assert not columns.has_stores
    for row, store in zip(rows, (b"one", b"other", b"one", b""), strict=True):
        columns.share(row, store)
    assert columns.store[:4].tolist() == [1, 2, 1, 0]
    assert columns.has_stores
    shared = [[columns.share_store(row, [other]) for other in rows] for row in rows]
    assert shared == [[True, False, True, False], [False, True, False, False], [True, False, True, False], [False] * 4]


def test_numbers_of_stores_are_given_again_when_no_engine_has_them() -> None:
    columns = EngineColumns()
    first, second = columns.add(), columns.add()
    for number in range(100):
        columns.share(first, b"%d" % number)  # its weights change, and with them what it can load
        columns.share(second, b"%d" % (number % 2))
    assert columns.store.max() <= 3
    columns.remove(first)
    columns.remove(second)
    assert not columns.store.any()
    assert columns.add() in (first, second)


def test_the_numbers_of_stores_outlast_more_engines_than_fit() -> None:
    columns = EngineColumns()
    for number in range(40):
        columns.share(columns.add(), b"%d" % (number // 2))
    assert [columns.share_store(row, [row ^ 1]) for row in range(40)] == [True] * 40
