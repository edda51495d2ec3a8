import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.engine.peer import Received
from tokenloom.engine_core.data import messages
from tokenloom.request import logprob_columns
from tokenloom.services.engine.streams.frame_builder import FrameBuilder
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, FINISH_REASON_STOP, Error, Logprobs


def drain(builder: FrameBuilder) -> Received:
    received = Received()
    while builder.has_data:
        received.take(builder.take(1))
        assert len(received.frames) < 1000
    return received


def test_one_token_each_needs_no_counts() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 0, [7])
    builder.add_tokens(4, 9, [8])
    frame = builder.take(3)
    assert (list(frame.slot), list(frame.token_index), list(frame.token_ids)) == ([1, 4], [0, 9], [7, 8])
    assert not frame.num_tokens
    assert frame.step == 3
    assert not builder.has_data


def test_steps_merge_until_they_are_taken() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 0, [7])
    builder.add_tokens(2, 0, [1])
    builder.add_tokens(1, 1, [8, 9])
    frame = builder.take(2)
    assert (list(frame.num_tokens), list(frame.token_ids)) == ([3, 1], [7, 8, 9, 1])


def test_first_tokens_and_ends_are_urgent() -> None:
    builder = FrameBuilder()
    for first, urgent in ((0, True), (1, False)):
        builder.add_tokens(1, first, [7])
        assert builder.is_urgent is urgent
        builder.take(1)
    builder.finish(Finished(slot=1, reason=FINISH_REASON_LENGTH))
    assert builder.is_urgent


def test_first_tokens_lead_their_frame() -> None:
    builder = FrameBuilder()
    for slot, token_index in ((1, 5), (3, 9), (4, 0), (6, 0), (7, 0)):
        builder.add_tokens(slot, token_index, [slot])
    builder.cut(6, 0)
    frame = builder.take(1)
    assert (list(frame.slot), list(frame.token_ids)) == ([4, 7, 1, 3], [4, 7, 1, 3])
    builder.add_tokens(1, 6, [1])
    builder.add_tokens(4, 1, [4])
    assert list(builder.take(2).slot) == [1, 4]


def test_what_did_not_fit_is_urgent() -> None:
    builder = FrameBuilder(1024)
    builder.add_tokens(1, 5, [7] * 1000)
    assert not builder.is_urgent
    builder.take(1)
    assert builder.is_urgent
    drain(builder)
    assert not builder.is_urgent


def test_an_urgent_frame_leaves_the_other_slots_waiting() -> None:
    builder = FrameBuilder()
    for slot, token_index in ((1, 5), (2, 8), (3, 0), (4, 9)):
        builder.add_tokens(slot, token_index, [slot])
    builder.finish(Finished(slot=4, reason=FINISH_REASON_LENGTH))
    frame = builder.take_urgent(3)
    assert (list(frame.slot), [end.slot for end in frame.finished], frame.step) == ([3, 4], [4], 3)
    assert builder.has_data
    assert not builder.is_urgent
    builder.add_tokens(2, 9, [7])
    frame = builder.take(4)
    assert (list(frame.slot), list(frame.num_tokens), list(frame.token_ids)) == ([1, 2], [1, 2], [1, 2, 7])
    assert not builder.has_data


def test_an_urgent_frame_has_what_is_left_when_nothing_urgent_is() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 5, [1])
    builder.add_tokens(2, 0, [2])
    builder.cut(2, 0)
    assert builder.is_urgent
    assert list(builder.take_urgent(1).slot) == [1]
    assert not builder.has_data
    assert not builder.is_urgent


@given(
    rows=st.dictionaries(st.integers(1, 2**32 - 1), st.tuples(st.booleans(), st.integers(1, 900)), max_size=40),
    max_bytes=st.integers(1, 8192),
)
def test_urgent_frames_lose_nothing(rows: dict[int, tuple[bool, int]], max_bytes: int) -> None:
    builder = FrameBuilder(max_bytes)
    for slot, (has_begun, count) in rows.items():
        builder.add_tokens(slot, 2**31 if has_begun else 0, [2**32 - 1] * count)
    received = Received()
    while builder.is_urgent:
        frame = builder.take_urgent(1)
        assert frame.slot
        received.take(frame)
    while builder.has_data:
        received.take(builder.take(1))
    assert {slot: len(ids) for slot, ids in received.token_ids.items()} == {slot: n for slot, (_, n) in rows.items()}
    assert all(frame.ByteSize() <= max(max_bytes, 1024) for frame in received.frames)


@given(
    rows=st.dictionaries(st.integers(1, 2**32 - 1), st.integers(1, 900), max_size=40),
    max_bytes=st.integers(1, 8192),
    message=st.integers(0, 2000),
)
def test_frames_fit_and_lose_nothing(rows: dict[int, int], max_bytes: int, message: int) -> None:
    builder = FrameBuilder(max_bytes)
    for slot, count in rows.items():
        builder.add_tokens(slot, 2**32 - 1000, [2**32 - 1] * count)
        builder.finish(Finished(slot=slot, num_output_tokens=count, error=Error(message="e" * message)))
    received = drain(builder)
    assert {slot: len(ids) for slot, ids in received.token_ids.items()} == rows
    assert received.finished.keys() == rows.keys()
    for frame in received.frames:
        # A single end may be larger than a peer takes that takes next to nothing.
        assert frame.ByteSize() <= max(max_bytes, 1024) or (not frame.slot and len(frame.finished) == 1)


def test_a_stop_drops_later_tokens_and_changes_the_end() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 10, [1, 2, 3, 4])
    builder.finish(Finished(slot=1, reason=FINISH_REASON_LENGTH, num_output_tokens=14, stop_token_id=4))
    builder.cut(1, 12)
    received = drain(builder)
    assert received.token_ids[1] == [1, 2]
    assert received.finished[1] == Finished(slot=1, reason=FINISH_REASON_STOP, num_output_tokens=12)


@pytest.mark.parametrize("num_tokens", [0, 3, 10])
def test_a_stop_before_what_waits_drops_all_of_it(num_tokens: int) -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 10, [1, 2])
    builder.cut(1, num_tokens)
    assert not builder.has_data


def logprobs(count: int, top: int, first: int = 0) -> Logprobs:
    """Every value tells its place."""
    return Logprobs(
        sampled=[-float(i) for i in range(first, first + count)],
        rank=range(first + 1, first + count + 1),
        top=top,
        token_id=range(first * top, (first + count) * top),
        logprob=[-float(i) for i in range(first * top, (first + count) * top)],
    )


def of_core(columns: Logprobs) -> messages.Logprobs:
    return messages.Logprobs(
        list(columns.sampled), list(columns.rank), columns.top, list(columns.token_id), list(columns.logprob)
    )


def test_log_probabilities_of_a_long_prompt_come_in_small_frames() -> None:
    """All at once, they kept an output processor from its other streams for half a second."""
    builder, told = FrameBuilder(64 << 20), logprobs(5000, 20)
    builder.add_prompt(1, of_core(told))
    builder.add_tokens(1, 0, [7])
    assert builder.is_urgent
    received = drain(builder)
    assert received.prompt_logprobs == {1: told}
    assert received.token_ids == {1: [7]}
    assert len(received.frames) >= 8
    assert max(frame.ByteSize() for frame in received.frames) <= 1 << 17


def test_log_probabilities_merge_with_their_tokens() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 0, [7], logprobs(1, 2))
    builder.add_tokens(2, 0, [9])
    builder.add_tokens(1, 1, [8, 9], logprobs(2, 2, first=1))
    frame = builder.take(1)
    (told,) = frame.logprobs
    assert (told.slot, told.token_index, told.logprobs) == (1, 0, logprobs(3, 2))


@given(
    rows=st.dictionaries(st.integers(1, 2**32 - 1), st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=6),
    prompt=st.integers(0, 40),
    max_bytes=st.integers(1024, 4096),
)
def test_frames_with_log_probabilities_fit_and_lose_nothing(
    rows: dict[int, tuple[int, int]], prompt: int, max_bytes: int
) -> None:
    builder = FrameBuilder(max_bytes)
    for slot, (count, top) in rows.items():
        if prompt:
            builder.add_prompt(slot, of_core(logprobs(prompt, top)))
        builder.add_tokens(slot, 0, [2**32 - 1] * count, logprobs(count, top))
        builder.finish(Finished(slot=slot, num_output_tokens=count))
    received = drain(builder)
    assert {slot: len(ids) for slot, ids in received.token_ids.items()} == {s: count for s, (count, _) in rows.items()}
    assert received.logprobs == {slot: logprobs(*row) for slot, row in rows.items()}
    assert received.finished.keys() == rows.keys()
    if prompt:
        assert received.prompt_logprobs == {slot: logprobs(prompt, top) for slot, (_, top) in rows.items()}
    for frame in received.frames:
        one_position = [logprob_columns.num_positions(each.logprobs) for each in frame.logprobs] == [1]
        assert frame.ByteSize() <= max_bytes or one_position


def test_a_stop_drops_later_log_probabilities() -> None:
    builder = FrameBuilder()
    builder.add_tokens(1, 10, [1, 2, 3, 4], logprobs(4, 1))
    builder.cut(1, 12)
    assert drain(builder).logprobs[1] == logprobs(2, 1)


def test_what_was_aborted_tells_nothing_of_its_prompt() -> None:
    builder = FrameBuilder()
    builder.add_prompt(1, of_core(logprobs(5, 1)))
    builder.finish(Finished(slot=1, reason=FINISH_REASON_ABORT))
    assert not builder.take(1).logprobs
    assert not builder.has_data
