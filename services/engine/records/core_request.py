"""Turns an ``AddRequest`` into the engine core's request: checked, also against what the model pools, with every
default filled in."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
from msgspec import inspect

from tokenloom.engine_core.data.core_params import (
    DRAWS_NOTHING,
    CorePoolingParams,
    CoreSamplingParams,
    GrammarKind,
    LateInteraction,
    PoolingTask,
    StructuredOutput,
    TimestampRules,
    TranscriptRules,
)
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.messages import EngineCoreRequest, SessionTurn
from tokenloom.request import validation
from tokenloom.request.errors import DeadlineExceeded, InvalidArgument
from tokenloom.request.narrowing import rows
from tokenloom.request.output_constraints import current_form
from tokenloom.request.packed_ids import ids_of, num_ids
from tokenloom.request.prompt_embeds import check_embeds
from tokenloom.request.sampling_params import RepetitionDetectionParams, SamplingFields
from tokenloom.v1 import engine_pb2, types_pb2

LEASE_ID_BYTES = 16
MAX_KEEP_SECONDS = 86_400
"""For no longer a prompt is kept because its client wants that."""
_MAX_ENGINE_ID_CHARS = 256
_MAX_TENANT_CHARS = 256
_DIGEST_BYTES = 32
_MAX_KEY_BYTES = 64
_MAX_TIME = 1 << 24
"""Rotary positions of the frames of a video: the whole numbers that float32 has, in which they are counted."""
_MAX_TIMEOUT_NS = 10**18
"""More than 31 years: a longer timeout ends no request either, and might not fit into the core's numbers."""


def to_core_request(
    add: engine_pb2.AddRequest, key: str, limits: types_pb2.ModelLimits, random: Random
) -> EngineCoreRequest:
    """Return the core's request, named ``key``. ``random`` draws its lease and its seed.

    Raises ``InvalidArgument`` naming the field or ``DeadlineExceeded``.
    """
    if (task := add.WhichOneof("task")) is None:
        raise InvalidArgument("task is not set; expected sampling_params or pooling_params", "task")
    prompt = add.prompt
    packed, listed = prompt.packed_token_ids, list(prompt.token_ids)  # a list is searched faster than the field
    pooling = to_core_pooling(add, limits) if task == "pooling_params" else None
    token_ids = ids_of(prompt) if packed else listed
    sampling = _read_sampling(add, token_ids, limits, random) if pooling is None else DRAWS_NOTHING
    if add.priority:
        validation.check_priority(add.priority, limits)
    if len(add.tenant) > _MAX_TENANT_CHARS:
        raise InvalidArgument(f"tenant has {len(add.tenant)} characters; at most {_MAX_TENANT_CHARS} fit", "tenant")
    if add.awaits_tokens or add.HasField("kv_source"):
        _check_kv(add, limits)
    if prompt.adapter and len(prompt.adapter) != _DIGEST_BYTES:
        raise InvalidArgument(f"adapter has {len(prompt.adapter)} bytes, expected {_DIGEST_BYTES}", "adapter")
    if add.HasField("timeout") and add.timeout.ToNanoseconds() <= 0:
        raise DeadlineExceeded("the request's time ran out before it reached an engine")
    return EngineCoreRequest(
        request_id=key,
        prompt_token_ids=listed,
        packed_prompt=packed,
        sampling_params=sampling,
        accepted_token_ids=list(add.accepted_token_ids),
        priority=add.priority,
        cache_salt=prompt.cache_salt,
        lease_id=random.randbytes(LEASE_ID_BYTES) if add.hold_kv else b"",
        awaits_tokens=add.awaits_tokens,
        prompt_embeds=to_spans(prompt.embeds) if prompt.embeds else [],
        media=to_media(prompt, limits) if prompt.media or limits.cross_media_rows else [],
        tenant=add.tenant,
        timeout_ns=min(add.timeout.ToNanoseconds(), _MAX_TIMEOUT_NS) if add.HasField("timeout") else 0,
        adapter=prompt.adapter,
        pooling_params=pooling,
        reasoning_start=prompt.reasoning_start,
        session=_read_turn(add.session) if add.HasField("session") else None,
    )


def _read_turn(turn: engine_pb2.SessionTurn) -> SessionTurn:
    keep_seconds = min(turn.keep_seconds, MAX_KEEP_SECONDS)
    return SessionTurn(turn.branch, turn.return_milliseconds * 1_000_000, keep_seconds * 1_000_000_000)


def _read_sampling(
    add: engine_pb2.AddRequest, token_ids: Sequence[int], limits: types_pb2.ModelLimits, random: Random
) -> CoreSamplingParams:
    """Check what a request generates from, and return its parameters. ``token_ids``: of its prompt."""
    if not limits.generates:  # unset it means true, which the check knows
        check_generates(limits)
    prompt, params = add.prompt, add.sampling_params
    validation.check_sampling(params, limits)
    validation.check_prompt(token_ids, params, limits)
    if add.accepted_token_ids:
        validation.check_accepted(add.accepted_token_ids, len(token_ids), limits)
    if prompt.embeds:
        check_embeds(prompt, params, limits)
    return to_core_sampling(params, limits, limits.max_model_len - len(token_ids), random)


def to_core_sampling(
    params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, default_max_tokens: int, random: Random
) -> CoreSamplingParams:
    """Return valid parameters with every default filled in; without a seed ``random`` draws one."""
    values: dict[str, Any] = {"max_tokens": default_max_tokens}
    for descriptor, value in params.ListFields():
        name = descriptor.name
        read = _READERS.get(name)
        values[name] = value if read is None else read(value)
    if "seed" not in values:
        values["seed"] = random.getrandbits(64)
    for name in ("logprobs", "prompt_logprobs"):
        if name in values:
            values[name] = min(values[name], limits.vocab_size)
    if "structured_outputs" in values:
        values["structured_output"] = values.pop("structured_outputs")
    return CoreSamplingParams(**values)


def to_spans(embeds: Iterable[types_pb2.PromptEmbeds]) -> list[EmbedsSpan]:
    """Return prompt embeddings for the core: views of the message's bytes, nothing is copied."""
    return [EmbedsSpan(span.position, np.frombuffer(span.rows, "<f4").reshape(span.num_tokens, -1)) for span in embeds]


def to_media(prompt: types_pb2.Prompt, limits: types_pb2.ModelLimits) -> list[MediaSpan]:
    """Return the images and sounds of a prompt for the core, in order. Raises ``InvalidArgument``."""
    if prompt.embeds:
        raise InvalidArgument("a prompt has either embeddings or images and sounds", "media")
    if limits.cross_media_rows:
        return [_beside(prompt.media, limits)]
    _check_counts(prompt, limits)
    spans = sorted((span for item in prompt.media for span in _runs(item, limits)), key=lambda span: span.position)
    end, num_tokens = 0, num_ids(prompt)
    for span in spans:
        if span.position < end or span.end > num_tokens:
            raise InvalidArgument("images and sounds overlap, or lie outside the prompt", "media")
        end = span.end
    return spans


def _check_counts(prompt: types_pb2.Prompt, limits: types_pb2.ModelLimits) -> None:
    for kind, name, most in (
        (types_pb2.MEDIA_KIND_IMAGE, "images", limits.max_images_per_prompt),
        (types_pb2.MEDIA_KIND_AUDIO, "sounds", limits.max_sounds_per_prompt),
        (types_pb2.MEDIA_KIND_VIDEO, "videos", limits.max_videos_per_prompt),
    ):
        count = sum(item.kind == kind for item in prompt.media)
        if count > most and kind in limits.media_kinds:
            raise InvalidArgument(f"the prompt has {count} {name}; at most {most} are allowed", "media")


def _beside(media: Sequence[types_pb2.MediaItem], limits: types_pb2.ModelLimits) -> MediaSpan:
    """Return the sound that stands beside a prompt. Raises ``InvalidArgument``."""
    if len(media) != 1 or media[0].kind not in limits.media_kinds:
        raise InvalidArgument(
            f"the prompt has {len(media)} sounds and this model writes down exactly one: send the sound to "
            "/v1/audio/transcriptions",
            "media",
        )
    [item] = media
    if not 0 < len(item.key) <= _MAX_KEY_BYTES or item.levels != 1 or item.runs:
        raise InvalidArgument(f"{_media_name(item)} has no key, not one level, or runs in the prompt", "media")
    if item.num_rows != limits.cross_media_rows:
        raise InvalidArgument(
            f"{_media_name(item)} has {item.num_rows} rows; this model reads {limits.cross_media_rows}", "media"
        )
    return MediaSpan(0, 0, 0, item.key, item.num_rows)


def _runs(item: types_pb2.MediaItem, limits: types_pb2.ModelLimits) -> Iterator[MediaSpan]:
    """Yield where the rows of an item stand. Raises ``InvalidArgument``."""
    if item.kind not in limits.media_kinds:
        raise InvalidArgument(f"{_media_name(item)}: this engine reads {_media_kinds(limits)}", "media")
    if not 0 < len(item.key) <= _MAX_KEY_BYTES or not item.levels or not item.runs:
        raise InvalidArgument(f"{_media_name(item)} has no key, no levels or no runs", "media")
    if not 1 <= item.num_rows <= limits.max_media_rows:
        raise InvalidArgument(
            f"{_media_name(item)} has {item.num_rows} rows; the engine takes up to {limits.max_media_rows}", "media"
        )
    frames, lines, columns = item.grid_t, item.grid_h, item.grid_w
    if frames and len(item.runs) == frames:
        frames = 1  # a run for each frame
    step = item.frame_step or 1.0
    if not 0 < step * max(frames, 1) <= _MAX_TIME:
        raise InvalidArgument(
            f"{_media_name(item)} has {frames} frames of {item.frame_step:g} rotary positions each; together they may "
            f"take {_MAX_TIME:,}",
            "media",
        )
    for run in item.runs:
        if not run.num_tokens or run.row_offset + run.num_tokens > item.num_rows:
            raise InvalidArgument(f"{_media_name(item)} has an empty run, or one beyond its rows", "media")
        if frames * lines * columns != (run.num_tokens if frames or lines or columns else 0):
            raise InvalidArgument(
                f"{_media_name(item)} has a run of {run.num_tokens} tokens in a grid of {frames} x {lines} x {columns}",
                "media",
            )
        grid = (frames, lines, columns)
        yield MediaSpan(
            run.position,
            run.num_tokens,
            run.row_offset,
            item.key,
            item.num_rows,
            item.is_whole,
            grid,
            item.levels,
            step,
        )


_NAMES = {
    types_pb2.MEDIA_KIND_IMAGE: "image",
    types_pb2.MEDIA_KIND_AUDIO: "sound",
    types_pb2.MEDIA_KIND_VIDEO: "video",
}


def _media_name(item: types_pb2.MediaItem) -> str:
    return f"{_NAMES.get(item.kind, 'image')} {item.index + 1}"


def _media_kinds(limits: types_pb2.ModelLimits) -> str:
    return " and ".join(["text", *(f"{_NAMES[kind]}s" for kind in limits.media_kinds if kind in _NAMES)]) + " only"


def _check_kv(add: engine_pb2.AddRequest, limits: types_pb2.ModelLimits) -> None:
    """Check that the legs exclude each other, and that a source covers some of the request's own tokens. With
    ``bound_tokens`` it may cover others that follow, as long as the request waits for these."""
    if not add.HasField("kv_source"):
        if add.awaits_tokens:
            raise InvalidArgument("awaits_tokens is set without a kv_source to read meanwhile", "awaits_tokens")
        return
    source = add.kv_source
    if add.hold_kv:
        raise InvalidArgument("hold_kv and kv_source are of different legs; only one may be set", "hold_kv")
    if len(source.lease_id) != LEASE_ID_BYTES:
        raise InvalidArgument(
            f"kv_source.lease_id has {len(source.lease_id)} bytes, expected {LEASE_ID_BYTES}", "kv_source"
        )
    if not 0 < len(source.engine_id) <= _MAX_ENGINE_ID_CHARS:
        raise InvalidArgument("kv_source.engine_id is empty or too long", "kv_source")
    num_tokens = num_ids(add.prompt) + len(add.accepted_token_ids)
    if source.bound_tokens > num_tokens:
        raise InvalidArgument(
            f"kv_source is bound to {source.bound_tokens} tokens, the request has {num_tokens}", "kv_source"
        )
    if source.bound_tokens and add.awaits_tokens:
        num_tokens = limits.max_model_len - 1  # the token after them is sampled, too
    if not 1 <= source.num_tokens <= num_tokens:
        raise InvalidArgument(f"kv_source covers {source.num_tokens} tokens, the request has {num_tokens}", "kv_source")


def _read_structured_outputs(constraint: types_pb2.StructuredOutputs) -> StructuredOutput:
    kind = GrammarKind(constraint.WhichOneof("constraint"))
    if kind in (GrammarKind.JSON, GrammarKind.JSON_OBJECT):
        pattern = constraint.whitespace_pattern if constraint.HasField("whitespace_pattern") else None
        return StructuredOutput(kind, constraint.json, pattern, constraint.disable_any_whitespace)
    if kind is GrammarKind.STRUCTURAL_TAG:
        return StructuredOutput(kind, current_form(constraint.structural_tag))
    if kind is GrammarKind.CHOICE:
        return StructuredOutput(kind, json.dumps(list(constraint.choice.texts)))
    return StructuredOutput(kind, getattr(constraint, kind))


def _read_transcript(rules: types_pb2.TranscriptRules) -> TranscriptRules:
    times = None
    if rules.HasField("timestamps"):
        wire = rules.timestamps
        most = wire.max_initial_index if wire.HasField("max_initial_index") else None
        times = TimestampRules(wire.first_token_id, wire.no_timestamps_token_id, wire.num_text_ids, most)
    return TranscriptRules(tuple(rules.suppressed_token_ids), tuple(rules.begin_suppressed_token_ids), times)


# The core takes plain data only: protobuf's repeated fields, maps and messages cannot be encoded for it.
_READERS: dict[str, Callable[[Any], Any]] = {
    **{name: tuple for name, row in rows(SamplingFields) if isinstance(row, inspect.ListType)},
    **{name: dict for name, row in rows(SamplingFields) if isinstance(row, inspect.DictType)},
    "bad_words": lambda words: tuple(tuple(word.ids) for word in words),
    "repetition_detection": lambda wire: RepetitionDetectionParams(
        max_pattern_size=wire.max_pattern_size, min_pattern_size=wire.min_pattern_size, min_count=wire.min_count
    ),
    "structured_outputs": _read_structured_outputs,
    "transcript": _read_transcript,
    "extra_args": json.loads,
}

_MAX_QUERY_ID_CHARS = 256


def to_core_pooling(add: engine_pb2.AddRequest, limits: types_pb2.ModelLimits) -> CorePoolingParams:
    """Return the parameters for the core. Raises ``InvalidArgument`` naming the field."""
    wire = add.pooling_params
    if wire.task not in limits.pooling_tasks:
        is_known = wire.task in types_pb2.PoolingTask.values()
        wanted = types_pb2.PoolingTask.Name(wire.task).removeprefix("POOLING_TASK_").lower() if is_known else wire.task
        raise InvalidArgument(
            f"task {wanted} is not among this model's pooling tasks: {_names(limits)}", "pooling_params.task"
        )
    validation.check_pooling_prompt(ids_of(add.prompt), limits, field="prompt")
    if add.prompt.embeds:
        raise InvalidArgument("prompt embeddings cannot be pooled; send token ids", "prompt_embeds")
    if add.prompt.media and wire.task != types_pb2.POOLING_TASK_ALIGN:
        raise InvalidArgument("images and sounds cannot be pooled; send text", "media")
    if add.accepted_token_ids or add.hold_kv or add.HasField("kv_source"):
        raise InvalidArgument("a pooling request has no output tokens and moves no KV", "pooling_params")
    if wire.first_part_tokens > (num_tokens := num_ids(add.prompt)):
        raise InvalidArgument(
            f"first_part_tokens is {wire.first_part_tokens}, but the prompt has {num_tokens} tokens",
            "first_part_tokens",
        )
    return CorePoolingParams(
        task=PoolingTask(wire.task),
        dimensions=_dimensions(wire, limits),
        use_activation=wire.use_activation if wire.HasField("use_activation") else None,
        first_part_tokens=wire.first_part_tokens,
        skipped_tokens=wire.skipped_tokens,
        late_interaction=_late_interaction(wire),
        aligned_rows=wire.aligned_rows,
    )


def _dimensions(wire: types_pb2.PoolingParams, limits: types_pb2.ModelLimits) -> int | None:
    if not wire.HasField("dimensions"):
        return None
    if not limits.matryoshka:
        raise InvalidArgument("dimensions: this model's vectors cannot be shortened; leave it out", "dimensions")
    if not wire.dimensions:
        raise InvalidArgument("dimensions must be at least 1", "dimensions")
    return wire.dimensions


def _late_interaction(wire: types_pb2.PoolingParams) -> LateInteraction | None:
    if not wire.HasField("late_interaction"):
        return None
    part = wire.late_interaction
    if wire.task != types_pb2.POOLING_TASK_TOKEN_EMBED:
        raise InvalidArgument("late_interaction is only possible with the task token_embed", "late_interaction")
    if not 0 < len(part.query_id) <= _MAX_QUERY_ID_CHARS:
        raise InvalidArgument("late_interaction.query_id is empty or too long", "late_interaction")
    return LateInteraction(part.query_id, part.num_documents)


def _names(limits: types_pb2.ModelLimits) -> str:
    return ", ".join(PoolingTask(task).name.lower() for task in limits.pooling_tasks) or "none"


def check_generates(limits: types_pb2.ModelLimits) -> None:
    """Raise ``InvalidArgument`` if the model generates no tokens."""
    if limits.HasField("generates") and not limits.generates:
        raise InvalidArgument(f"this model generates no tokens; its pooling tasks are: {_names(limits)}", "model")
