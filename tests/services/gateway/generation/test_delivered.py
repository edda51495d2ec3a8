"""Tests where the text of an output is cut, so that an answer has the same events whenever it is shaped."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.gateway.generation.delivered import MAX_PIECE, TextPieces
from tokenloom.services.gateway.mesh.collector import Delta
from tokenloom.v1.output_processor_pb2 import RequestFinished

WORDS = st.text(st.sampled_from("ab  \n\t日本、\u3000é😀"), max_size=200)
CUTS = st.lists(st.integers(0, 12), min_size=1)


def pieces_of(text: str, sizes: Sequence[int]) -> list[tuple[str, bool]]:
    """Return the pieces of a text that comes in deltas of these sizes, in turn, and whether each has the end."""
    pieces, cut, at, turn = TextPieces(), list[Delta](), 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)] or 3
        cut += pieces.cut(Delta(0, at, text[at : at + size]))
        at, turn = at + size, turn + 1
    cut += pieces.cut(Delta(0, len(text), "", [], RequestFinished()))
    return [(piece.text, piece.finished is not None) for piece in cut]


@given(WORDS, CUTS, CUTS)
def test_the_pieces_depend_on_the_text_alone(text: str, sizes: list[int], others: list[int]) -> None:
    pieces = pieces_of(text, sizes)
    assert pieces == pieces_of(text, others)
    assert "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


@given(WORDS)
def test_an_end_with_the_last_text_makes_the_same_pieces(text: str) -> None:
    whole = TextPieces().cut(Delta(0, 0, text, [], RequestFinished()))
    assert [(piece.text, piece.finished is not None) for piece in whole] == pieces_of(text, [3])


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Once upon a time", ["Once", " upon", " a", " time"]),
        ("日本 is", ["日", "本", " is"]),
        ("x" * 150 + " y", ["x" * MAX_PIECE, "x" * MAX_PIECE, "x" * 22, " y"]),
        ("\u3000a b", ["\u3000a", " b"]),
        ("", [""]),
    ],
)
def test_a_piece_is_a_word(text: str, pieces: list[str]) -> None:
    cut = TextPieces().cut(Delta(0, 0, text, [], RequestFinished()))
    assert [piece.text for piece in cut] == pieces
