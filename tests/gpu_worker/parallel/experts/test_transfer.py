"""Moves lead from one placement to another, and all bytes are sent in bounded pieces."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.gpu_worker.parallel.experts.transfer import Move, MoveList, moves_between


def test_moves_turn_one_placement_into_another() -> None:
    current, planned = np.array([0, 1, 2, 0, 4, 3]), np.array([0, 2, 2, 1, 0, 3])
    moves = moves_between(current, planned, per_rank=2)
    placed = current.copy()
    for move in moves:
        placed[move.target] = current[move.source]
    assert np.array_equal(placed, planned)
    assert [move.target for move in moves] == [1, 3, 4]
    assert moves_between(current, current, per_rank=2) == ()


def test_copies_of_an_expert_are_sent_by_different_ranks() -> None:
    moves = moves_between(np.array([0, 1, 0, 2, 3, 4, 5, 6]), np.array([0, 1, 0, 2, 3, 0, 5, 0]), per_rank=2)
    assert moves == (Move(0, 5), Move(2, 7))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 11), unique=True, max_size=12),
    st.integers(1, 50),
    st.integers(1, 120),
)
def test_every_byte_is_sent_once_in_bounded_turns(targets: list[int], expert_bytes: int, step_bytes: int) -> None:
    moves = tuple(Move((target + 5) % 12, target) for target in sorted(targets))
    listed = MoveList(moves, 3, expert_bytes, step_bytes)
    sent = {move: bytearray(expert_bytes) for move in moves}
    for turn in range(listed.num_turns):
        received: Counter[int] = Counter()
        for piece in listed.pieces(turn):
            received[piece.move.target // 3] += piece.end - piece.begin
            for place in range(piece.begin, piece.end):
                sent[piece.move][place] += 1
        assert received
        assert max(received.values()) <= step_bytes
    assert all(each == b"\1" * expert_bytes for each in sent.values())
    assert not list(listed.pieces(listed.num_turns))
