"""An Add becomes a message that the core can be sent, or is refused by name."""

from random import Random
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from tests.services.engine.peer import make_add
from tokenloom.engine_core.data.core_params import TimestampRules, TranscriptRules
from tokenloom.engine_core.data.embedding_rows import MediaSpan
from tokenloom.engine_core.data.messages import EngineCoreRequest, SessionTurn
from tokenloom.engine_core.wire.frames import Decoder, encode
from tokenloom.request.errors import DeadlineExceeded, InvalidArgument
from tokenloom.request.packed_ids import pack
from tokenloom.services.engine.records.core_request import MAX_KEEP_SECONDS, to_core_request
from tokenloom.v1 import engine_pb2, types_pb2

LIMITS = types_pb2.ModelLimits(max_model_len=100, vocab_size=100, max_logprobs=20)
POOLING = types_pb2.ModelLimits(
    max_model_len=100, vocab_size=100, max_logprobs=20, pooling_tasks=[types_pb2.POOLING_TASK_EMBED]
)
CENTURY = 100 * 365 * 24 * 3600


@pytest.mark.parametrize(
    ("timeout", "nanoseconds"),
    [
        (Duration(nanos=1), 1),
        (Duration(seconds=CENTURY), 10**18),
        (Duration(seconds=2**64 // 10**9 + 1), 10**18),
        (Duration(seconds=2**63 - 1, nanos=2**31 - 1), 10**18),
    ],
)
def test_a_timeout_of_any_length_fits_into_the_message(timeout: Duration, nanoseconds: int) -> None:
    request = to_core_request(make_add(1, [1, 2], timeout=timeout), "key", LIMITS, Random(0))
    assert Decoder(EngineCoreRequest).decode(encode(request)).timeout_ns == nanoseconds


@pytest.mark.parametrize("timeout", [Duration(), Duration(seconds=-1), Duration(seconds=-(2**63))])
def test_a_timeout_that_is_over_is_refused(timeout: Duration) -> None:
    with pytest.raises(DeadlineExceeded):
        to_core_request(make_add(1, [1, 2], timeout=timeout), "key", LIMITS, Random(0))


@pytest.mark.parametrize("task", [types_pb2.POOLING_TASK_CLASSIFY, 77, 2**31 - 1])
def test_a_pooling_task_that_the_model_has_not_is_named(task: types_pb2.PoolingTask) -> None:
    add = make_add(1, [1, 2], sampling_params=None, pooling_params=types_pb2.PoolingParams(task=task))
    with pytest.raises(InvalidArgument, match="is not among this model's pooling tasks: embed"):
        to_core_request(add, "key", POOLING, Random(0))


def test_the_turn_of_a_session_reaches_the_core() -> None:
    turn = engine_pb2.SessionTurn(
        branch=(1 << 64) - 1, return_milliseconds=(1 << 32) - 1, past_tokens=5, keep_seconds=300
    )
    request = to_core_request(make_add(1, [1, 2], session=turn), "key", LIMITS, Random(0))
    decoded = Decoder(EngineCoreRequest).decode(encode(request))
    assert decoded.session == SessionTurn((1 << 64) - 1, ((1 << 32) - 1) * 1_000_000, 300 * 10**9)
    for asked, kept in ((0, 0), ((1 << 32) - 1, MAX_KEEP_SECONDS * 10**9)):
        turn.keep_seconds = asked
        read = to_core_request(make_add(1, [1, 2], session=turn), "key", LIMITS, Random(0)).session
        assert read is not None
        assert read.keep_ns == kept
    assert to_core_request(make_add(1, [1, 2]), "key", LIMITS, Random(0)).session is None


WITH_MEDIA = types_pb2.ModelLimits(
    max_model_len=100,
    vocab_size=100,
    max_logprobs=20,
    media_kinds=[types_pb2.MEDIA_KIND_IMAGE],
    max_images_per_prompt=2,
    max_sounds_per_prompt=1,
    max_media_rows=12,
)


def item(*runs: tuple[int, int, int], key: bytes = b"k", num_rows: int = 12, **fields: Any) -> types_pb2.MediaItem:
    made = [types_pb2.MediaRun(position=position, num_tokens=n, row_offset=offset) for position, n, offset in runs]
    values = {"kind": types_pb2.MEDIA_KIND_IMAGE, "levels": 1, "num_rows": num_rows, "runs": made}
    return types_pb2.MediaItem(key=key, **{**values, **fields})


def with_media(*items: types_pb2.MediaItem) -> engine_pb2.AddRequest:
    add = make_add(1, range(40))
    add.prompt.media.extend(items)
    return add


def test_images_reach_the_core_in_order_of_position() -> None:
    lines = item((20, 4, 0), (25, 4, 4), (30, 4, 8), levels=2)
    frames = item((2, 6, 0), (10, 6, 6), key=b"f", grid_t=2, grid_h=2, grid_w=3, is_whole=True)
    request = to_core_request(with_media(lines, frames), "key", WITH_MEDIA, Random(0))
    assert Decoder(EngineCoreRequest).decode(encode(request)).media == [
        MediaSpan(2, 6, 0, b"f", 12, True, (1, 2, 3)),
        MediaSpan(10, 6, 6, b"f", 12, True, (1, 2, 3)),
        MediaSpan(20, 4, 0, b"k", 12, levels=2),
        MediaSpan(25, 4, 4, b"k", 12, levels=2),
        MediaSpan(30, 4, 8, b"k", 12, levels=2),
    ]
    whole = to_core_request(with_media(item((0, 12, 0), grid_t=1, grid_h=3, grid_w=4)), "key", WITH_MEDIA, Random(0))
    assert whole.media[0].grid == (1, 3, 4)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([item((0, 4, 0)), item((3, 4, 0))], "overlap"),
        ([item((30, 11, 0))], "outside the prompt"),
        ([item((0, 4, 9))], "beyond its rows"),
        ([item((0, 0, 0))], "empty run"),
        ([item()], "no runs"),
        ([item((0, 4, 0), key=b"")], "no key"),
        ([item((0, 4, 0), key=bytes(65))], "no key"),
        ([item((0, 4, 0), levels=0)], "no levels"),
        ([item((0, 4, 0), num_rows=13)], "image 1 has 13 rows; the engine takes up to 12"),
        (
            [item((0, 4, 0), kind=types_pb2.MEDIA_KIND_AUDIO, index=3)],
            "sound 4: this engine reads text and images only",
        ),
        ([item((0, 4, 0), grid_t=1, grid_h=2, grid_w=3)], "4 tokens in a grid of 1 x 2 x 3"),
        ([item((0, 4, 0), grid_h=2, grid_w=2)], "in a grid of 0 x 2 x 2"),
        ([item((4 * index, 4, 0)) for index in range(3)], "3 images; at most 2"),
    ],
)
def test_images_that_cannot_be_computed_are_refused(items: list[types_pb2.MediaItem], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error) as caught:
        to_core_request(with_media(*items), "key", WITH_MEDIA, Random(0))
    assert caught.value.field == "media"


def test_images_and_sounds_are_counted_by_themselves() -> None:
    both = types_pb2.ModelLimits()
    both.CopyFrom(WITH_MEDIA)
    both.media_kinds.append(types_pb2.MEDIA_KIND_AUDIO)
    images = [item((4 * index, 4, 0)) for index in range(2)]
    sounds = [item((4 * index, 4, 0), kind=types_pb2.MEDIA_KIND_AUDIO) for index in range(2, 4)]
    assert len(to_core_request(with_media(*images, sounds[0]), "key", both, Random(0)).media) == 3
    with pytest.raises(InvalidArgument, match="2 sounds; at most 1"):
        to_core_request(with_media(*images, *sounds), "key", both, Random(0))


def test_videos_have_their_times_and_their_own_limit() -> None:
    limits = types_pb2.ModelLimits()
    limits.CopyFrom(WITH_MEDIA)
    limits.media_kinds.append(types_pb2.MEDIA_KIND_VIDEO)
    limits.max_videos_per_prompt = 1
    grid = {"kind": types_pb2.MEDIA_KIND_VIDEO, "grid_t": 3, "grid_h": 2, "grid_w": 2}
    (span,) = to_core_request(with_media(item((0, 12, 0), frame_step=2.5, **grid)), "key", limits, Random(0)).media
    assert (span.grid, span.frame_step) == ((3, 2, 2), 2.5)
    apart = item(*((5 * at, 4, 4 * at) for at in range(3)), **grid)
    spans = to_core_request(with_media(apart), "key", limits, Random(0)).media
    assert [(each.grid, each.frame_step) for each in spans] == [((1, 2, 2), 1.0)] * 3
    for step in (float("nan"), float("inf"), -1.0, 2.0**24):
        with pytest.raises(InvalidArgument, match=r"video 1 has 3 frames of .* rotary positions each"):
            to_core_request(with_media(item((0, 12, 0), frame_step=step, **grid)), "key", limits, Random(0))
    with pytest.raises(InvalidArgument, match="2 videos; at most 1"):
        to_core_request(with_media(*[item((0, 4, 0), kind=types_pb2.MEDIA_KIND_VIDEO)] * 2), "key", limits, Random(0))
    with pytest.raises(InvalidArgument, match="video 1: this engine reads text and images only"):
        to_core_request(with_media(item((0, 12, 0), **grid)), "key", WITH_MEDIA, Random(0))


def test_a_model_of_text_takes_no_images() -> None:
    with pytest.raises(InvalidArgument, match="image 1: this engine reads text only"):
        to_core_request(with_media(item((0, 4, 0))), "key", LIMITS, Random(0))


def test_images_stand_neither_beside_embeddings_nor_in_what_is_pooled() -> None:
    add = with_media(item((0, 4, 0)))
    add.prompt.embeds.add(position=10, num_tokens=1, rows=bytes(4))
    limits = types_pb2.ModelLimits()
    limits.CopyFrom(WITH_MEDIA)
    limits.hidden_size = 1
    with pytest.raises(InvalidArgument, match="either embeddings or images"):
        to_core_request(add, "key", limits, Random(0))
    pooled = engine_pb2.AddRequest(
        slot=1,
        pooling_params=types_pb2.PoolingParams(task=types_pb2.POOLING_TASK_EMBED),
        prompt=with_media(item((0, 4, 0))).prompt,
    )
    with pytest.raises(InvalidArgument, match="cannot be pooled"):
        to_core_request(pooled, "key", POOLING, Random(0))


BESIDE = types_pb2.ModelLimits(
    max_model_len=100,
    vocab_size=100,
    max_logprobs=20,
    media_kinds=[types_pb2.MEDIA_KIND_AUDIO],
    max_sounds_per_prompt=1,
    max_media_rows=12,
    cross_media_rows=12,
)


def test_a_sound_reaches_the_core_beside_its_prompt() -> None:
    sound = item(kind=types_pb2.MEDIA_KIND_AUDIO)
    request = to_core_request(with_media(sound), "key", BESIDE, Random(0))
    assert Decoder(EngineCoreRequest).decode(encode(request)).media == [MediaSpan(0, 0, 0, b"k", 12)]


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([], "0 sounds and this model writes down exactly one: send the sound to /v1/audio/transcriptions"),
        ([item(kind=2), item(kind=2)], "2 sounds and this model writes down exactly one"),
        ([item()], "writes down exactly one"),
        ([item((0, 4, 0), kind=2)], "runs in the prompt"),
        ([item(kind=2, key=b"")], "no key"),
        ([item(kind=2, levels=2)], "not one level"),
        ([item(kind=2, num_rows=11)], "11 rows; this model reads 12"),
    ],
)
def test_a_prompt_has_one_sound_beside_it(items: list[types_pb2.MediaItem], error: str) -> None:
    with pytest.raises(InvalidArgument, match=error) as raised:
        to_core_request(with_media(*items), "key", BESIDE, Random(0))
    assert raised.value.field == "media"


def test_rules_of_transcripts_reach_the_core() -> None:
    add = with_media(item(kind=2))
    add.sampling_params.transcript.suppressed_token_ids.extend([1, 2])
    add.sampling_params.transcript.begin_suppressed_token_ids.append(3)
    times = add.sampling_params.transcript.timestamps
    times.first_token_id, times.no_timestamps_token_id, times.num_text_ids = 60, 59, 50
    rules = to_core_request(add, "key", BESIDE, Random(0)).sampling_params.transcript
    assert rules == TranscriptRules((1, 2), (3,), TimestampRules(60, 59, 50))
    times.max_initial_index = 0
    rules = to_core_request(add, "key", BESIDE, Random(0)).sampling_params.transcript
    assert rules == TranscriptRules((1, 2), (3,), TimestampRules(60, 59, 50, 0))
    times.first_token_id = 100
    with pytest.raises(InvalidArgument, match="token id 100"):
        to_core_request(add, "key", BESIDE, Random(0))


def test_other_models_refuse_rules_of_transcripts() -> None:
    add = make_add(1, [1, 2])
    add.sampling_params.transcript.suppressed_token_ids.append(1)
    with pytest.raises(InvalidArgument, match="only for models that transcribe sound"):
        to_core_request(add, "key", LIMITS, Random(0))


def test_packed_ids_are_those_of_a_list() -> None:
    listed = to_core_request(make_add(1, [1, 2, 99]), "key", LIMITS, Random(0))
    add = make_add(1, [])
    add.prompt.packed_token_ids = pack([1, 2, 99])
    sent = to_core_request(add, "key", LIMITS, Random(0))
    packed = Decoder(EngineCoreRequest).decode(encode(sent))
    assert (packed.prompt_token_ids, packed.num_prompt_tokens, packed.listed_prompt()) == ([], 3, [1, 2, 99])
    assert (listed.num_prompt_tokens, listed.listed_prompt()) == (3, [1, 2, 99])
    assert packed.sampling_params == listed.sampling_params


@pytest.mark.parametrize(
    ("packed", "listed", "message"),
    [
        (pack([1, 100]), [], "prompt holds token id 100; ids go from 0 to 99"),
        (pack([1] * 100), [], "prompt has 100"),
        (b"12345", [], "packed_token_ids has 5 bytes beside 0 token_ids"),
        (pack([1]), [1], "packed_token_ids has 4 bytes beside 1 token_ids"),
    ],
)
def test_wrong_packed_ids_are_refused(packed: bytes, listed: list[int], message: str) -> None:
    add = make_add(1, listed)
    add.prompt.packed_token_ids = packed
    with pytest.raises(InvalidArgument, match=message):
        to_core_request(add, "key", LIMITS, Random(0))
