from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request import logprob_columns
from tokenloom.v1.types_pb2 import Logprobs


def columns(n: int, top: int) -> Logprobs:
    """Every value tells its place."""
    return Logprobs(
        sampled=[-float(i) for i in range(n)],
        rank=range(1, n + 1),
        top=top,
        token_id=range(n * top),
        logprob=[-float(i) for i in range(n * top)],
    )


@given(n=st.integers(0, 20), top=st.integers(0, 5), data=st.data())
def test_parts_join_to_the_whole(n: int, top: int, data: st.DataObject) -> None:
    whole = columns(n, top)
    cut = data.draw(st.integers(0, n))
    joined = logprob_columns.part(whole, 0, cut)
    assert logprob_columns.num_positions(joined) == cut
    logprob_columns.extend(joined, logprob_columns.part(whole, cut, n))
    assert joined == whole
    assert logprob_columns.fit_together(joined)


def test_columns_of_wrong_lengths() -> None:
    assert logprob_columns.fit_together(Logprobs())
    for field in ("sampled", "rank", "token_id", "logprob"):
        torn = columns(3, 2)
        getattr(torn, field).pop()
        assert not logprob_columns.fit_together(torn)
