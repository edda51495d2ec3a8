"""``AddRequest`` → the engine core's request: validated, every default filled in."""

import secrets
from collections.abc import Iterable

import numpy as np

from tokenloom.engine_core.wire.core_sampling_params import RepetitionDetection, SamplingParams
from tokenloom.engine_core.wire.embedding_rows import EmbedsSpan
from tokenloom.engine_core.wire.messages import EngineCoreRequest
from tokenloom.request import validation
from tokenloom.request.errors import DeadlineExceeded, InvalidArgument
from tokenloom.request.prompt_embeds import check_embeds
from tokenloom.v1 import engine_pb2, types_pb2

from .grammar_config import to_core_structured_output

LEASE_ID_BYTES = 16
_MAX_ENGINE_ID_CHARS = 256


def to_core_request(add: engine_pb2.AddRequest, key: str, limits: types_pb2.ModelLimits) -> EngineCoreRequest:
    """The core's request, named ``key``. Raises ``InvalidArgument`` naming the field, or ``DeadlineExceeded``."""
    _check_supported(add)
    params = add.sampling_params
    validation.check_generate(add.prompt.token_ids, params, limits, accepted_token_ids=add.accepted_token_ids)
    validation.check_priority(add.priority, limits)
    check_embeds(add.prompt, params, limits)
    _check_kv(add)
    if add.HasField("timeout") and add.timeout.ToNanoseconds() <= 0:
        raise DeadlineExceeded("the request's time ran out before it reached an engine")
    num_left = limits.max_model_len - len(add.prompt.token_ids)
    return EngineCoreRequest(
        request_id=key,
        prompt_token_ids=list(add.prompt.token_ids),
        sampling_params=to_core_sampling(params, limits, default_max_tokens=num_left),
        accepted_token_ids=list(add.accepted_token_ids),
        priority=add.priority,
        cache_salt=add.prompt.cache_salt,
        lease_id=secrets.token_bytes(LEASE_ID_BYTES) if add.hold_kv else b"",
        awaits_tokens=add.awaits_tokens,
        prompt_embeds=to_spans(add.prompt.embeds),
    )


def to_core_sampling(
    params: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, *, default_max_tokens: int
) -> SamplingParams:
    """Valid parameters with every default filled in; without a seed one is drawn."""
    return SamplingParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else default_max_tokens,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        stop_token_ids=tuple(params.stop_token_ids),
        min_tokens=params.min_tokens,
        logprobs=min(params.logprobs, limits.vocab_size) if params.HasField("logprobs") else None,
        prompt_logprobs=min(params.prompt_logprobs, limits.vocab_size) if params.HasField("prompt_logprobs") else None,
        logprob_token_ids=tuple(params.logprob_token_ids),
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in params.bad_words),
        repetition_detection=_repetition_detection(params),
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        structured_output=to_core_structured_output(params),
    )


def _repetition_detection(params: types_pb2.SamplingParams) -> RepetitionDetection | None:
    if not params.HasField("repetition_detection"):
        return None
    wire = params.repetition_detection
    return RepetitionDetection(wire.max_pattern_size, wire.min_pattern_size, wire.min_count)


def to_spans(embeds: Iterable[types_pb2.PromptEmbeds]) -> list[EmbedsSpan]:
    """Prompt embeddings of a checked request: views of the message's bytes, nothing is copied."""
    return [EmbedsSpan(span.position, np.frombuffer(span.rows, "<f4").reshape(span.num_tokens, -1)) for span in embeds]


def _check_supported(add: engine_pb2.AddRequest) -> None:
    """Refuses what a later version brings: better than answering something else."""
    if add.WhichOneof("task") is None:
        raise InvalidArgument("task is not set; expected sampling_params", "task")


def _check_kv(add: engine_pb2.AddRequest) -> None:
    """The legs exclude each other, and a source covers some of the request's own tokens."""
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
    num_tokens = len(add.prompt.token_ids) + len(add.accepted_token_ids)
    if not 1 <= source.num_tokens <= num_tokens:
        raise InvalidArgument(f"kv_source covers {source.num_tokens} tokens, the request has {num_tokens}", "kv_source")
