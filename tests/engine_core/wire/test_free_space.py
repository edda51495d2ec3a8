from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tokenloom.engine_core.wire.array_arena import FreeSpace

SIZE = 64


def test_low_space_is_used_again_first() -> None:
    space = FreeSpace(10)
    assert [space.take(3), space.take(3), space.take(4), space.take(1)] == [0, 3, 6, None]
    space.give_back(6, 4)
    space.give_back(0, 3)
    assert space.nbytes == 7
    assert space.take(5) is None, "7 are free, but not in one piece"
    assert space.take(2) == 0


def test_of_nothing_there_is_nothing() -> None:
    assert FreeSpace(0).take(1) is None


class Lives(RuleBasedStateMachine):
    """Against a model with a flag for each byte."""

    pieces = Bundle("pieces")

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeSpace(SIZE)
        self.is_free = [True] * SIZE

    @rule(target=pieces, nbytes=st.integers(1, SIZE))
    def take(self, nbytes: int) -> object:
        fits = [i for i in range(SIZE - nbytes + 1) if all(self.is_free[i : i + nbytes])]
        start = self.space.take(nbytes)
        assert start == (fits[0] if fits else None)
        if start is None:
            return multiple()
        self.is_free[start : start + nbytes] = [False] * nbytes
        return start, nbytes

    @rule(piece=consumes(pieces))
    def give_back(self, piece: tuple[int, int]) -> None:
        start, nbytes = piece
        self.space.give_back(start, nbytes)
        self.is_free[start : start + nbytes] = [True] * nbytes

    @invariant()
    def as_much_is_free(self) -> None:
        assert self.space.nbytes == sum(self.is_free)


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
