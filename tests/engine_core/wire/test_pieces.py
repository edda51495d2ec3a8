from hypothesis import given
from hypothesis import strategies as st

from tokenloom.engine_core.wire.frames import IOV_MAX, Pieces


@given(st.lists(st.binary(max_size=5), max_size=9), st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_pieces_are_moved_in_order_however_few_bytes_a_call_takes(buffers: list[bytes], counts: list[int]) -> None:
    pieces, moved = Pieces(buffers), b""
    while head := pieces.head():
        assert all(map(len, head))
        counts = [*counts[1:], counts[0]]
        part = b"".join(map(bytes, head))[: counts[0]]
        pieces.advance(len(part))
        moved += part
    assert moved == b"".join(buffers)


def test_a_call_gets_no_more_pieces_than_the_system_takes() -> None:
    for count in (0, 1, IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 2 * IOV_MAX, 2 * IOV_MAX + 1):
        pieces, sizes = Pieces([b"x", b""] * count), []
        while head := pieces.head():
            sizes.append(len(head))
            pieces.advance(len(head))
        assert sum(sizes) == count
        assert all(size == IOV_MAX for size in sizes[:-1])
        assert all(size <= IOV_MAX for size in sizes)


def test_the_rest_of_a_piece_comes_before_later_ones() -> None:
    pieces = Pieces([b"abc", b"de", b"f"])
    assert pieces.head() == [b"abc", b"de", b"f"]
    pieces.advance(0)
    assert pieces.head() == [b"abc", b"de", b"f"]
    pieces.advance(4)
    assert pieces.head() == [b"e", b"f"]
    pieces.advance(2)
    assert pieces.head() == []
