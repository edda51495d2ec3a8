"""Requests with images: their rows are asked for after the prefix lookup, and are there when a step needs them.

The hash worker derives tokens from the rows that a step brought, and fails if one is missing or too many.
"""

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_core, make_request, tokens_of
from tests.engine_core.media import ROW_BYTES, RowClient, expected, image, keys_of, make_media, rows_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import SchedulerConfig
from tokenloom.engine_core.data.core_params import CorePoolingParams, PoolingTask
from tokenloom.engine_core.data.embedding_rows import MediaSpan
from tokenloom.engine_core.data.messages import ArrivedRows, FinishReason
from tokenloom.engine_core.data.request import RequestStatus
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.engine_core.scheduling.media_rows import RowStore
from tokenloom.engine_core.scheduling.step_planner import PauseState


def status_of(core: EngineCore, request_id: str) -> RequestStatus:
    return core.scheduler.requests[request_id].status


@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_are_those_of_the_rows(budget: int, async_scheduling: bool) -> None:
    client = RowClient(make_core(budget=budget, async_scheduling=async_scheduling))
    requests = [
        make_media("one", image(4, 10, "a")),
        make_media("two", image(0, 5, "a"), image(9, 12, "b")),
        make_media("all", image(0, 30, "c")),
        make_media("last", image(20, 10, "d")),
        make_media("text"),
    ]
    client.add(*requests)
    client.finish()
    client.check(requests)
    assert len({tuple(tokens) for tokens in client.tokens.values()}) == len(requests)


def test_another_image_gives_other_tokens() -> None:
    client = RowClient(make_core())
    requests = [make_media(key, image(4, 10, key)) for key in ("a", "b")]
    client.add(*requests)
    client.finish()
    client.check(requests)
    assert client.tokens["a"] != client.tokens["b"]


def test_only_images_beyond_the_hits_are_asked_for() -> None:
    """Blocks of 4 tokens."""
    client = RowClient(make_core())
    turns = [
        make_media("first", image(4, 8, "a"), image(14, 8, "b")),
        make_media("again", image(4, 8, "a"), image(14, 8, "b")),
        make_media("longer", image(4, 8, "a"), image(14, 8, "b"), image(40, 8, "c"), length=60),
    ]
    asked = []
    for turn in turns:
        client.add(turn)
        client.finish()
        asked.append(keys_of(client.asked))
        client.asked.clear()
    client.check(turns)
    assert asked == [["a", "b"], [], ["c"]]


def test_a_request_that_skips_the_cache_asks_for_all() -> None:
    client = RowClient(make_core())
    client.add(make_media("first", image(4, 8, "a")))
    client.finish()
    again = make_media("again", image(4, 8, "a"))
    params = msgspec.structs.replace(again.sampling_params, skip_reading_prefix_cache=True)
    again.sampling_params = params
    client.add(again)
    client.finish()
    assert keys_of(client.asked) == ["a", "a"]
    client.check([again])


def test_text_goes_on_while_an_image_is_on_its_way() -> None:
    client = RowClient(make_core(), at_once=False)
    requests = [make_media("image", image(4, 8)), make_request("text", range(10, 30), 5)]
    client.add(*requests)
    client.finish()
    assert list(client.ended) == ["text"]
    assert status_of(client.core, "image") is RequestStatus.WAITING_FOR_ROWS
    stats = client.core.scheduler.stats()
    assert (stats.num_waiting, stats.num_waiting_for_rows, stats.num_running) == (1, 1, 0)
    assert stats.num_waiting_tokens == 30
    assert stats.rows_bytes == 8 * ROW_BYTES
    client.bring()
    client.finish()
    client.check([requests[0]])
    stats = client.core.scheduler.stats()
    assert (stats.num_waiting, stats.rows_items_asked, stats.rows_items_received) == (0, 1, 1)
    assert stats.rows_bytes_received == 8 * ROW_BYTES


def test_requests_with_one_image_share_its_rows() -> None:
    """Both are named, so that the client knows who waits; the rows are held once."""
    client = RowClient(make_core(), at_once=False)
    requests = [make_media(name, image(4, 8), salt=name.encode()) for name in "ab"]
    client.add(*requests)
    client.step()
    assert [wanted.request_id for wanted in client.asked] == ["a", "b"]
    assert client.core.scheduler.stats().rows_bytes == 8 * ROW_BYTES
    client.bring()
    client.finish()
    client.check(requests)
    assert client.core.scheduler.stats().rows_items_asked == 1


def test_an_image_that_stands_twice_in_a_prompt_is_kept_for_its_second_place() -> None:
    client = RowClient(make_core(budget=8))
    request = make_media("r", image(2, 6), image(20, 6), image(27, 2, "b"))
    client.add(request)
    client.finish()
    client.check([request])
    assert keys_of(client.asked) == ["image", "b"]


def test_runs_of_one_image_take_their_own_rows() -> None:
    client = RowClient(make_core(budget=5, max_num_seqs=4))
    runs = [MediaSpan(2 + 5 * line, 4, 4 * line, b"k", 12) for line in range(3)]
    request = make_media("lines", *runs)
    client.add(request)
    client.finish()
    client.check([request])
    assert keys_of(client.asked) == ["k"]


@pytest.mark.parametrize(("budget", "chunked"), [(64, True), (12, True), (64, False)])
def test_more_images_than_there_is_room_for_come_one_after_the_other(budget: int, chunked: bool) -> None:
    core = make_core(budget=budget, chunked=chunked, max_model_len=64, rows_bytes=20 * ROW_BYTES)
    client = RowClient(core)
    requests = [
        make_media("a", image(2, 10, "a1"), image(14, 10, "a2"), length=40),
        make_media("b", image(2, 20, "b1"), length=40),
        make_media("c", image(2, 10, "c1"), image(14, 10, "a2"), length=40),
        make_media("text", length=40),
    ]
    if chunked:
        requests.append(make_media("many", *(image(2 + 9 * each, 8, f"m{each}") for each in range(5)), length=50))
    client.add(*requests)
    most = 0
    while core.has_work():
        client.step()
        most = max(most, core.scheduler.stats().rows_bytes)
    client.check(requests)
    assert 0 < most <= 20 * ROW_BYTES


def test_a_request_that_runs_takes_the_room_of_those_that_wait() -> None:
    """It has blocks and a seat that they may wait for."""
    core = make_core(budget=64, max_num_seqs=1, rows_bytes=10 * ROW_BYTES)
    client = RowClient(core)
    first = make_media("first", image(2, 8, "a"), image(12, 8, "b"), max_tokens=3)
    second = make_media("second", image(2, 8, "c"), max_tokens=3)
    client.add(first, second)
    client.finish()
    client.check([first, second])


@pytest.mark.parametrize("whole", [False, True])
def test_preempted_requests_ask_again(whole: bool) -> None:
    client = RowClient(make_core(num_blocks=20, max_num_seqs=4, max_model_len=80, caching=False))
    requests = [make_media(key, image(3, 20, key, is_whole=whole), max_tokens=20) for key in "abc"]
    client.add(*requests)
    client.finish()
    client.check(requests)
    assert client.core.scheduler.stats().num_preemptions
    assert len(client.asked) > 3


def test_rows_outlast_a_failed_step() -> None:
    client = RowClient(make_core(budget=8))
    requests = [make_media(key, image(3, 20, key)) for key in "ab"]
    client.add(*requests)
    for _ in range(3):
        client.step()
    client.core.scheduler.recover_from_failed_step()
    client.finish()
    client.check(requests)


def test_a_request_that_waits_for_rows_may_be_aborted() -> None:
    client = RowClient(make_core(), at_once=False)
    requests = [make_media(name, image(4, 8), salt=name.encode()) for name in "ab"]
    client.add(*requests)
    client.step()
    client.core.abort_requests(["a"])
    client.bring()
    client.finish()
    assert not client.tokens["a"]
    client.check(requests[1:])


def test_rows_that_nothing_waits_for_any_more_are_dropped() -> None:
    client = RowClient(make_core(), at_once=False)
    client.add(make_media("a", image(4, 8)))
    client.step()
    client.core.abort_requests(["a"])
    client.bring()
    assert client.core.scheduler.stats().rows_bytes == 0
    assert client.core.scheduler.stats().rows_items_received == 0


def test_all_requests_may_be_ended_while_some_wait() -> None:
    client = RowClient(make_core(), at_once=False)
    client.add(make_media("a", image(4, 8)), make_request("b", range(9), 200))
    client.step()
    client.core.scheduler.abort_all()
    client.step()
    assert {output.finish_reason for output in client.ended.values()} == {FinishReason.ABORT}
    client.check([])


def test_a_pause_that_waits_does_not_end_before_a_preempted_request() -> None:
    core = make_core(num_blocks=20, max_num_seqs=4, max_model_len=80, caching=False)
    client = RowClient(core, at_once=False)
    requests = [make_media(key, image(3, 20, key), max_tokens=20) for key in "abc"]
    client.add(*requests)
    client.step()
    client.bring()
    while not core.scheduler.stats().num_waiting_for_rows:
        client.step()
    quiet = core.pause("wait")
    client.finish()
    assert core.scheduler.media is not None
    assert all(parked.is_known_to_worker for parked in core.scheduler.media.parked.values())
    while core.has_requests():
        assert not quiet.done()
        client.bring()
        client.finish()
    assert quiet.done()
    client.check(requests)


def test_nothing_begins_during_a_pause_and_what_arrives_is_kept() -> None:
    client = RowClient(make_core(), at_once=False)
    request = make_media("a", image(4, 8))
    client.add(request)
    client.step()
    client.core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    client.bring()
    client.step()
    assert status_of(client.core, "a") is RequestStatus.WAITING
    client.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    client.finish()
    client.check([request])


def test_time_that_runs_out_during_the_wait_ends_a_request() -> None:
    client = RowClient(make_core(), at_once=False)
    request = make_media("a", image(4, 8))
    request.arrival_ns, request.timeout_ns = 1, 1  # it is late when the rows come, not before
    late = make_media("b", image(4, 8, "b"))
    client.add(late)
    client.step()
    client.core.scheduler.requests["b"].times.deadline_ns = 1
    client.bring()
    client.add(request)
    client.finish()
    assert [client.ended[name].finish_reason for name in "ab"] == [FinishReason.ERROR] * 2


@pytest.mark.parametrize("beside", [None, 4])
def test_no_chunk_ends_inside_an_image_that_is_seen_as_a_whole(beside: int | None) -> None:
    """The hash worker checks it. A prefix hit may end inside of it: then the rest is one chunk."""
    client = RowClient(make_core(budget=24, beside_decode=beside, max_num_seqs=16))
    requests = [make_media(f"text {index}", length=5 + index, max_tokens=40) for index in range(3)]
    requests += [make_media(str(seed), image(3 + seed, 18, str(seed), is_whole=True)) for seed in range(4)]
    requests.append(make_media("two", image(3, 9, "5", is_whole=True), image(12, 9, "6", is_whole=True)))
    client.add(*requests)
    client.finish()
    client.add(again := make_media("again", image(3, 18, "0", is_whole=True)))
    client.finish()
    client.check([*requests, again])


def test_a_step_is_cleared_for_an_image_that_takes_all_of_it() -> None:
    client = RowClient(make_core(budget=16, max_num_seqs=8, num_blocks=128))
    requests = [make_media(f"text {index}", length=8 + index, max_tokens=60) for index in range(5)]
    requests += [make_media(key, image(0, 16, key, is_whole=True), length=20) for key in "ab"]
    client.add(*requests)
    client.finish()
    client.check(requests)


def test_a_step_never_holds_more_than_its_budget() -> None:
    core = make_core(budget=16, max_num_seqs=8, num_blocks=128, beside_decode=2)
    most = 0
    execute = core.executor.execute_model

    def count(scheduled):  # type: ignore[no-untyped-def]
        nonlocal most
        most = max(most, scheduled.total_num_scheduled_tokens)
        execute(scheduled)

    core.executor.execute_model = count  # type: ignore[method-assign]
    client = RowClient(core)
    requests = [make_media(f"text {index}", length=8 + index, max_tokens=60) for index in range(5)]
    requests += [make_media(key, image(2, 14, key, is_whole=True), length=20) for key in "ab"]
    client.add(*requests)
    client.finish()
    client.check(requests)
    assert most <= 16


@pytest.mark.parametrize(
    ("span", "settings", "error"),
    [
        (image(0, 20), {"rows_bytes": 19 * ROW_BYTES}, "20 rows, which take 640 bytes; the engine has room for 608"),
        (image(0, 20, is_whole=True), {"budget": 16}, "20 tokens that one step must compute; a step computes 16"),
    ],
)
def test_what_never_fits_is_refused(span: MediaSpan, settings: dict[str, int], error: str) -> None:
    client = RowClient(make_core(**settings))
    client.add(make_media("r", span))
    client.finish()
    assert error in client.ended["r"].error
    assert client.core.scheduler.stats().rows_items_asked == 0


def test_without_chunks_all_images_of_a_prompt_must_fit() -> None:
    client = RowClient(make_core(chunked=False, max_model_len=64, rows_bytes=20 * ROW_BYTES))
    client.add(make_media("r", image(0, 11, "a"), image(12, 11, "b")))
    client.finish()
    assert "it needs all at once" in client.ended["r"].error


def test_a_model_of_text_refuses_images() -> None:
    core = make_core()
    core.scheduler.media = None
    client = RowClient(core)
    client.add(make_media("r", image(0, 5)))
    client.finish()
    assert client.ended["r"].error == "this model reads text only"


def test_rows_are_forgotten_and_asked_for_again() -> None:
    client = RowClient(make_core(budget=8), at_once=False)
    requests = [make_media("a", image(4, 20, "a")), make_media("b", image(4, 20, "b"))]
    client.add(*requests)
    client.step()
    client.bring(1)
    for _ in range(2):
        client.step()
    client.core.scheduler.reset_rows()
    assert client.core.scheduler.stats().rows_bytes == 0
    client.pending.clear()
    client.step()
    assert keys_of(client.asked) == ["a", "b", "a", "b"]
    client.bring()
    client.finish()
    client.check(requests)


@pytest.mark.parametrize(("first", "shape"), [(0, (8, 9)), (0, (9, 8)), (1, (7, 8)), (4, (5, 8)), (0, (8,))])
def test_rows_of_another_shape_or_place_are_an_error_of_the_client(first: int, shape: tuple[int, ...]) -> None:
    client = RowClient(make_core(), at_once=False)
    client.add(make_media("a", image(4, 8)))
    client.step()
    (wanted,) = client.asked
    with pytest.raises(ValueError, match=r"0 of \(8, 8\) are here"):
        client.core.scheduler.take_rows(ArrivedRows(wanted.key, wanted.number, first, np.zeros(shape, np.float32)))


def test_rows_come_in_pieces_and_a_request_waits_for_the_last() -> None:
    client = RowClient(make_core())
    client.rows_of_piece = 3
    request = make_media("a", image(4, 8))
    client.add(request)
    client.finish()
    client.check([request])
    assert client.core.scheduler.stats().rows_items_received == 1


def test_rows_of_an_earlier_asking_are_dropped() -> None:
    client = RowClient(make_core(), at_once=False)
    for name in "ab":
        client.core.abort_requests(["a"])
        client.add(make_media(name, image(4, 8)))
        client.step()
    first, second = client.asked
    assert first.number < second.number
    client.core.scheduler.take_rows(ArrivedRows(first.key, first.number, 0, rows_of(first.key)[:2]))
    assert client.core.scheduler.stats().rows_bytes_received == 0


def test_rows_of_other_levels_are_refused() -> None:
    client = RowClient(make_core())
    client.add(make_media("r", MediaSpan(0, 5, 0, b"k", 5, levels=3)))
    client.finish()
    assert client.ended["r"].error == "an image or sound has rows of 3 levels; this model reads 1"


def test_drafts_do_not_change_the_tokens() -> None:
    client = RowClient(make_core(num_drafts=3))
    requests = [make_media(key, image(4, 8, key), max_tokens=20) for key in "ab"]
    client.add(*requests)
    client.finish()
    client.check(requests)


def test_accepted_tokens_of_an_earlier_attempt_follow_the_image() -> None:
    whole = make_media("whole", image(4, 8), max_tokens=8)
    tokens = expected(whole)
    client = RowClient(make_core())
    rest = make_media("rest", image(4, 8), max_tokens=8, accepted=tokens[:3])
    client.add(rest)
    client.finish()
    assert client.tokens["rest"] == tokens[3:]
    assert tokens_of([client.ended["rest"]]) == tokens[-1:]


@pytest.mark.parametrize("budget", [8, 64])
def test_an_image_of_one_row_may_end_a_prompt(budget: int) -> None:
    """Its token was planned as a decoded one, without its row, if it came after the rows before it."""
    client = RowClient(make_core(rows_bytes=19 * ROW_BYTES, budget=budget))
    requests = [make_media("a", image(10, 19, "x"), image(29, 1, "y")), make_media("text", max_tokens=20)]
    client.add(*requests)
    client.finish()
    client.check(requests)


@pytest.mark.parametrize("seed", [184, *range(205, 225)])
def test_any_images_in_little_room(seed: int) -> None:
    """In 211 a request lost the rows of its step, because the one that held them was preempted for its blocks."""
    random, requests = Random(seed), []
    for number in range(random.randint(1, 5)):
        spans, position, length = list[MediaSpan](), 0, random.randint(1, 40)
        while position < length and len(spans) < 4:
            position += random.choice([0, 0, 1, 3, 7])
            count = min(random.choice([1, 1, 2, 3, 6, 9]), length - position)
            if count <= 0:
                break
            key = random.choice("abcd") + str(count)
            spans.append(image(position, count, key, is_whole=random.random() < 0.3))
            position += count
        requests.append(make_media(f"r{number}", *spans, length=length, max_tokens=random.randint(1, 8)))
    settings: dict[str, object] = {
        "rows_bytes": random.choice([9, 10, 14, 40]) * ROW_BYTES,
        "budget": random.choice([9, 10, 16, 64]),
        "num_blocks": random.choice([12, 14, 20, 64]),
        "async_scheduling": random.random() < 0.4,
        "beside_decode": random.choice([None, 1, 4]),
        "max_num_seqs": random.choice([1, 2, 8]),
    }
    if not settings["async_scheduling"] and random.random() < 0.4:
        settings["num_drafts"] = 3
    client = RowClient(make_core(**settings))
    client.add(*requests)
    client.finish()
    client.check(requests)


def make_hearing_core(cross_rows: int = 6, **settings: Any) -> EngineCore:
    config = make_config(**settings)
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, cross_rows=cross_rows)
    return EngineCore(config, UniProcExecutor(worker))


def sound(name: str = "a", num_rows: int = 6) -> MediaSpan:
    return MediaSpan(0, 0, 0, name.encode(), num_rows)


def test_a_request_waits_for_the_sound_beside_its_prompt() -> None:
    client = RowClient(make_hearing_core(), at_once=False)
    request, again = make_media("r", sound()), make_media("s", sound())
    client.add(request)
    client.finish()
    media = client.core.scheduler.media
    assert media is not None
    assert (list(media.parked), client.tokens["r"]) == (["r"], [])
    client.bring()
    client.finish()
    client.add(again)
    client.finish()
    wanted = expected_tokens(request.prompt_token_ids, 5, VOCAB_SIZE, beside=rows_of(sound().rows_key))
    assert client.tokens == {"r": wanted, "s": wanted}
    assert len(client.asked) == 1, "the keys and values of the rows are found"
    assert media.num_bytes == 0


def test_an_abort_ends_the_wait_for_a_sound() -> None:
    client = RowClient(make_hearing_core(), at_once=False)
    client.add(make_media("r", sound()))
    client.finish()
    client.core.abort_requests(["r"])
    client.finish()
    assert not client.core.scheduler.requests
    assert client.core.scheduler.kv.pool.usage == 0.0


@pytest.mark.parametrize(
    ("media", "error"),
    [
        ([], "needs exactly one"),
        ([sound("a"), sound("b")], "needs exactly one"),
        ([image(0, 3)], "needs exactly one"),
        ([sound("a", 5)], "5 rows; this model reads 6"),
    ],
)
def test_a_prompt_without_its_sound_is_refused(media: list[MediaSpan], error: str) -> None:
    client = RowClient(make_hearing_core())
    client.add(make_media("r", *media))
    client.finish()
    assert error in client.ended["r"].error


def test_an_engine_without_room_for_a_sound_does_not_start() -> None:
    worker = HashWorker(make_config(), vocab_size=VOCAB_SIZE, max_model_len=256, cross_rows=6)
    model, size = worker.load_model(), 6 * ROW_BYTES
    with pytest.raises(ValueError, match=f"rows_cache_bytes is {size - 1}; the rows of one sound take {size} bytes"):
        RowStore.of_model(SchedulerConfig(rows_cache_bytes=size - 1), model)
    assert RowStore.of_model(SchedulerConfig(rows_cache_bytes=size), model) is not None


def test_an_alignment_whose_sound_is_refused_names_no_field_that_it_has_not() -> None:
    client = RowClient(make_hearing_core())
    pooling = CorePoolingParams(PoolingTask.ALIGN)
    client.add(msgspec.structs.replace(make_media("r", sound("a", 5)), pooling_params=pooling))
    client.finish()
    assert "5 rows; this model reads 6" in client.ended["r"].error
    assert client.ended["r"].error_field == ""


def test_a_model_that_reads_rows_in_prompts_refuses_those_beside() -> None:
    client = RowClient(make_core())
    client.add(make_media("r", sound()))
    client.finish()
    assert "none beside it" in client.ended["r"].error


@pytest.mark.parametrize("settings", [{"num_drafts": 2}])
def test_what_excludes_rows_beside_prompts_is_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not set speculative_config"):
        make_hearing_core(**settings)
