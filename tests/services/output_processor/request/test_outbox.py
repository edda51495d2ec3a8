"""Tests that the columns of a frame are parallel, merged by slot and complete after any sequence of calls."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.output_processor.request.outbox import Outbox, PacedOutbox
from tokenloom.v1.output_processor_pb2 import ProcessFrame, RequestFinished, SlotTextLogprobs

additions = st.lists(st.tuples(st.integers(1, 4), st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3)))


@given(additions=additions, take_after=st.sets(st.integers(0, 20)))
def test_what_comes_out_is_what_went_in(additions: list[tuple[int, str, list[int]]], take_after: set[int]) -> None:
    outbox = Outbox(lambda: None)
    texts, ids = dict[int, str](), dict[int, list[int]]()
    got_texts, got_ids = dict[int, str](), dict[int, list[int]]()
    for i, (slot, text, token_ids) in enumerate(additions):
        outbox.add((slot, 0), text, len(ids.get(slot, [])), token_ids)
        texts[slot] = texts.get(slot, "") + text
        ids[slot] = ids.get(slot, []) + token_ids
        if i in take_after:
            read(outbox.take(), got_texts, got_ids)
            assert not outbox
    read(outbox.take(), got_texts, got_ids)
    assert (got_texts, got_ids) == (texts, ids)


def read(frame: ProcessFrame, texts: dict[int, str], ids: dict[int, list[int]]) -> None:
    """As a gateway reads it: indices continue, slots come at most once."""
    counts = list(frame.num_tokens) or [1] * len(frame.slot)
    assert len(set(frame.slot)) == len(frame.slot)
    assert sum(counts) == len(frame.token_ids)
    start = 0
    for slot, text, index, count in zip(frame.slot, frame.text, frame.token_index, counts, strict=True):
        known = ids.setdefault(slot, [])
        assert index == len(known)
        known += frame.token_ids[start : start + count]
        texts[slot] = texts.get(slot, "") + text
        start += count


def test_one_token_each_needs_no_counts() -> None:
    outbox = Outbox(lambda: None)
    outbox.add((1, 0), "a", 0, [5])
    outbox.add((2, 0), "b", 3, [6])
    assert outbox.take() == ProcessFrame(slot=[1, 2], text=["a", "b"], token_index=[0, 3], token_ids=[5, 6])


def test_every_kind_of_news_is_announced_and_ends_come_with_the_rows() -> None:
    news: list[int] = []
    outbox = Outbox(lambda: news.append(1))
    assert not outbox
    outbox.add((1, 0), "a", 0, [5])
    outbox.engine_died(1)
    outbox.finish(RequestFinished(slot=1))
    assert len(news) == 3
    assert outbox
    frame = outbox.take()
    assert (list(frame.slot), list(frame.engine_death_slots), len(frame.finished)) == ([1], [1], 1)


def test_a_paced_outbox_passes_on_the_first_token_then_every_so_many_then_the_rest() -> None:
    outbox = Outbox(lambda: None)
    paced = PacedOutbox(outbox, 3)
    pieces: list[tuple[str, list[int], int]] = []
    for index, text in enumerate("abcdefg"):
        paced.add_logprobs((1, 0), SlotTextLogprobs(token_index=index))
        paced.add((1, 0), text, index, [index])
        if outbox:
            frame = outbox.take()
            pieces.append((frame.text[0], list(frame.token_ids), len(frame.logprobs)))
    paced.add((1, 0), "h", 7, [7])
    paced.finish(RequestFinished(slot=1))
    last = outbox.take()
    assert pieces == [("a", [0], 1), ("bcd", [1, 2, 3], 3), ("efg", [4, 5, 6], 3)]
    assert (list(last.text), list(last.token_ids), len(last.finished)) == (["h"], [7], 1)
