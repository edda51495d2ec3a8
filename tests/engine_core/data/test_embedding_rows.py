import numpy as np
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_core, make_request, tokens_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan, block_salt, content_salt
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE, expected_tokens
from tokenloom.engine_core.wire.array_arena import MIN_BYTES
from tokenloom.engine_core.wire.frames import Decoder, encode


def make_span(position: int, length: int, seed: int = 0) -> EmbedsSpan:
    return EmbedsSpan(position, np.random.default_rng(seed).random((length, HIDDEN_SIZE), dtype=np.float32))


def make_wide(position: int, length: int, seed: int = 0) -> EmbedsSpan:
    """Too large to lie in a frame where there is shared memory."""
    return EmbedsSpan(position, np.random.default_rng(seed).random((length, MIN_BYTES // 40), dtype=np.float32))


def make_mixed(request_id: str, *spans: EmbedsSpan, length: int = 30, max_tokens: int = 5) -> EngineCoreRequest:
    """Ids from 1 on, zeros where there are rows."""
    prompt = list(range(1, length + 1))
    for span in spans:
        prompt[span.position : span.position + len(span.rows)] = [0] * len(span.rows)
    request = make_request(request_id, prompt, max_tokens)
    request.prompt_embeds = list(spans)
    return request


def expected(request: EngineCoreRequest, vocab_size: int = VOCAB_SIZE) -> list[int]:
    prompt = list(request.prompt_token_ids)
    for span in request.prompt_embeds:
        prompt[span.position : span.position + len(span.rows)] = embeds_ids(span)
    return expected_tokens(prompt, request.sampling_params.max_tokens, vocab_size)


@pytest.mark.parametrize("budget", [8, 64])
def test_rows_and_ids_make_one_prompt(budget: int) -> None:
    core = make_core(budget=budget)
    requests = [
        make_mixed("all", make_span(0, 30)),
        make_mixed("some", make_span(2, 3), make_span(7, 12, seed=1)),
        make_mixed("none"),
    ]
    for request in requests:
        core.add_request(request)
    outputs = finish(core)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == expected(request)


def test_only_the_same_rows_share_blocks() -> None:
    core = make_core()
    hits = []
    for index, seed in enumerate((0, 1, 0)):
        core.add_request(request := make_mixed(str(index), make_span(0, 8, seed)))
        before = core.scheduler.stats().prefix_cache_hits
        assert tokens_of(finish(core)[str(index)]) == expected(request)
        hits.append(core.scheduler.stats().prefix_cache_hits - before)
    assert hits == [0, 0, 28]


def hits_of(core: EngineCore, *requests: EngineCoreRequest) -> list[int]:
    """Run the requests one after the other. Returns how many tokens each found in the prefix cache."""
    hits = []
    for request in requests:
        before = core.scheduler.stats().prefix_cache_hits
        core.add_request(request)
        assert tokens_of(finish(core)[request.request_id]) == expected(request)
        hits.append(core.scheduler.stats().prefix_cache_hits - before)
    return hits


def test_prompts_share_the_blocks_before_their_first_embedding() -> None:
    """Blocks of 4 tokens: two are before position 11."""
    requests = [
        make_mixed("plain"),
        make_mixed("a", make_span(11, 8)),
        make_mixed("b", make_span(11, 8, seed=1)),
        make_mixed("first block", make_span(3, 1)),
        make_mixed("b again", make_span(11, 8, seed=1)),
        make_mixed("plain again"),
    ]
    assert hits_of(make_core(), *requests) == [0, 8, 8, 0, 28, 28]


def test_prompts_share_equal_embeddings_up_to_the_first_difference() -> None:
    first, long = make_span(2, 4), make_span(9, 12, seed=1)
    last_row_differs = EmbedsSpan(9, np.vstack([long.rows[:-1], long.rows[-1:] + 1]))
    requests = [
        make_mixed("a", first, long),
        make_mixed("b", first, last_row_differs),  # its last row is token 20, the first of the sixth block
        make_mixed("c", first, EmbedsSpan(10, long.rows)),
        make_mixed("d", EmbedsSpan(2, first.rows[:2]), EmbedsSpan(4, first.rows[2:]), long),
    ]
    assert hits_of(make_core(), *requests) == [0, 20, 8, 28]


def test_a_salt_of_the_request_separates_equal_embeddings() -> None:
    requests = [make_mixed(str(index), make_span(11, 8)) for index in range(3)]
    requests[1].cache_salt = requests[2].cache_salt = b"mine"
    assert hits_of(make_core(), *requests) == [0, 0, 28]


def test_the_salt_of_a_block_covers_what_lies_in_it() -> None:
    spans = [make_span(2, 4), make_span(6, 1, seed=1), make_span(9, 12, seed=2)]
    at = {start: block_salt(b"s", spans, start, start + 4) for start in range(0, 28, 4)}
    assert at[24] == b"s"
    assert len(set(at.values())) == 7
    moved = [EmbedsSpan(span.position + 4, span.rows) for span in spans]
    assert block_salt(b"s", moved, 0, 4) == b"s"
    assert block_salt(b"s", moved, 4, 8) == at[0]


def test_rows_outlast_preemption_and_a_failed_step() -> None:
    core = make_core(num_blocks=20, max_num_seqs=4, max_model_len=80)
    requests = [make_mixed(str(seed), make_span(3, 20, seed), max_tokens=20) for seed in range(3)]
    for request in requests:
        core.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
        steps += 1
        if steps == 3:
            core.scheduler.recover_from_failed_step()
    assert core.scheduler.stats().num_preemptions
    assert tokens == {request.request_id: expected(request) for request in requests}


def test_rows_travel_as_a_frame_of_their_own() -> None:
    request = make_mixed("a", make_span(2, 20))
    frames = encode(request)
    assert [len(frame) for frame in frames[1:]] == [20 * HIDDEN_SIZE * 4]
    (span,) = Decoder(EngineCoreRequest).decode(frames).prompt_embeds
    np.testing.assert_array_equal(span.rows, request.prompt_embeds[0].rows)


def test_the_salt_stands_for_every_row_and_where_it_is() -> None:
    spans = [make_span(2, 3), make_span(9, 4)]
    variants = [
        (b"", []),
        (b"a", []),
        (b"", spans),
        (b"a", spans),
        (b"", spans[:1]),
        (b"", [EmbedsSpan(3, spans[0].rows), spans[1]]),
        (b"", [EmbedsSpan(2, spans[0].rows + 1), spans[1]]),
        (b"", [EmbedsSpan(2, spans[0].rows.reshape(6, -1)), spans[1]]),
    ]
    assert len({content_salt(*variant) for variant in variants}) == len(variants)
    assert content_salt(b"a", []) == b"a"


def test_images_change_what_identifies_a_prompt_by_key_and_place() -> None:
    image = MediaSpan(2, 3, 0, b"k", 5)
    variants = [
        [],
        [image],
        [MediaSpan(3, 3, 0, b"k", 5)],
        [MediaSpan(2, 3, 1, b"k", 5)],
        [MediaSpan(2, 3, 0, b"l", 5)],
        [image, MediaSpan(5, 2, 3, b"k", 5)],
    ]
    assert len({content_salt(b"", [], media) for media in variants}) == len(variants)
    assert content_salt(b"a", [], []) == b"a"
    assert content_salt(b"a", [make_span(9, 4)], [image]) != content_salt(b"a", [], [image])
    assert image.end == 5
