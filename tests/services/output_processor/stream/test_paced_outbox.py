from tokenloom.services.output_processor.stream.outbox import Outbox
from tokenloom.services.output_processor.stream.paced_outbox import PacedOutbox
from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs


def test_the_first_token_then_every_so_many_then_the_rest() -> None:
    outbox = Outbox(lambda: None)
    paced = PacedOutbox(outbox, 3)
    pieces: list[tuple[str, list[int], int]] = []
    for index, text in enumerate("abcdefg"):
        paced.tell((1, 0), SlotTextLogprobs(token_index=index))
        paced.add((1, 0), text, index, [index])
        if outbox:
            frame = outbox.take()
            pieces.append((frame.text[0], list(frame.token_ids), len(frame.logprobs)))
    paced.add((1, 0), "h", 7, [7])
    paced.finish(RequestFinished(slot=1))
    last = outbox.take()
    assert pieces == [("a", [0], 1), ("bcd", [1, 2, 3], 3), ("efg", [4, 5, 6], 3)]
    assert (list(last.text), list(last.token_ids), len(last.finished)) == (["h"], [7], 1)


def test_a_dead_engine_is_told_at_once() -> None:
    outbox = Outbox(lambda: None)
    PacedOutbox(outbox, 3).engine_died(1)
    assert list(outbox.take().engine_death_slots) == [1]
