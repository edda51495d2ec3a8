"""Proves that what live requests take up is counted exactly, however they come and go."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.services.output_processor.fakes import submit
from tokenloom.request.errors import TryElsewhere
from tokenloom.request.limits import Reservation
from tokenloom.services.output_processor.request.outbox import NOWHERE
from tokenloom.services.output_processor.request.requests import (
    LiveRequestLimit,
    default_prompt_bytes,
    prompt_bytes,
)
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.types_pb2 import FinishReason, PromptEmbeds

requests = st.tuples(st.integers(1, 64), st.integers(1, 4))  # prompt tokens, samples
MAX_BYTES = 2000


@given(st.lists(st.tuples(requests, st.integers(0, 100))))
def test_the_bounds_hold_and_all_that_ended_makes_room(steps: list[tuple[tuple[int, int], int]]) -> None:
    room, live = LiveRequestLimit(10, MAX_BYTES), list[Reservation]()
    sizes: dict[Reservation, int] = {}
    for (num_tokens, num_samples), choice in steps:
        request = submit(1, range(num_tokens), num_samples=num_samples)
        was_empty = not live
        try:
            room.check(request)
        except TryElsewhere:
            if live:
                place = live[choice % len(live)]
                place.release(1)
                if not place.amount:
                    live.remove(place)
        else:
            live.append(room.take(request, num_samples))
            sizes[live[-1]] = prompt_bytes(request)
            assert room.num_live <= 10
            assert room.num_bytes <= MAX_BYTES or was_empty
        assert room.num_bytes == sum(sizes[place] for place in live)
        assert room.num_live == sum(place.amount for place in live)
    for place in live:
        for _ in range(place.amount):
            place.release(1)
    assert room.num_live == room.num_bytes == 0


def test_embeddings_count() -> None:
    request = submit(1, [])
    request.prompt.embeds.append(PromptEmbeds(rows=bytes(1000)))
    assert prompt_bytes(request) == 2000


@pytest.mark.parametrize(("limit", "expected"), [(None, 1 << 30), (512 << 20, 256 << 20)])
def test_the_default_follows_the_memory_limit(limit: int | None, expected: int) -> None:
    assert default_prompt_bytes(limit) == expected


def test_an_output_counts_with_what_python_takes_for_it(byte_level_tokenizer: Tokenizer) -> None:
    """Of 16 tokens 600 bytes were counted: small requests that are kept took many times what the limit allows."""
    vocabulary, count = Vocabulary(byte_level_tokenizer), 200

    def output(slot: int) -> SampleOutput:
        ended = SampleOutput(submit(slot, max_tokens=16), vocabulary, frozenset(), NOWHERE)
        for index in range(16):
            ended.add(index, [65])
        ended.finish(Finished(reason=FinishReason.FINISH_REASON_LENGTH, num_output_tokens=16))
        return ended

    output(0)
    tracemalloc.start()
    try:
        outputs = [output(slot) for slot in range(count)]
        taken, _ = tracemalloc.get_traced_memory()  # the messages' own memory is beyond that
    finally:
        tracemalloc.stop()
    assert sum(each.num_kept_bytes for each in outputs) > taken
