"""Reads the parts of OpenAI's request bodies that chat and completions share."""

import dataclasses
import functools
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import TTFT_DEADLINE
from tokenloom.request.narrowing import SAMPLING_NAMES, narrow, narrow_int, narrow_sampling
from tokenloom.request.output_constraints import json_schema_constraint, relax, structural_tag_constraint
from tokenloom.request.validation import check_stop_count
from tokenloom.v1 import output_processor_pb2, types_pb2

from ..assistant.message_plans import MessagePlan
from ..openapi.request_schemas import CommonFields, StreamOptions
from ..records.compat import IGNORED_FIELDS
from ..records.generate_request import BeamOptions, Chat, EmbeddedPrompt, GenerateRequest
from ..records.request_ids import NEW, ResumeToken, token_of_key, tokens_of
from ..tenants.tenant import Tenant
from .event_ids import FIELD as EVENT_FIELD
from .event_ids import (
    MAX_OUTPUTS,
    NO_EVENT,
    EventId,
    IdKind,
    NumberedEvent,
    parse_event_id,
    parse_numbered_id,
)

_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_REASONING = frozenset({"effort", "enabled", "exclude"})
_THINKING = frozenset({"type"})
_MESSAGE = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "refusal"),
        *("function_call", "audio"),  # refused unless they are empty
    }
)
_PART = frozenset({"type", "text", "refusal", "image_url", "input_audio", "audio_url", "video_url", "uuid"})
_IMAGE = frozenset({"url"})


def ignored_members(where: str, values: Iterable[Any], known: frozenset[str]) -> Iterator[str]:
    """Yield the path of each member of the objects among ``values`` that is not known and not empty."""
    for value in values:
        if isinstance(value, dict) and not value.keys() <= known:
            yield from (f"{where}.{name}" for name in value if name not in known and value[name])


def inherited(ignored: Iterable[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return what has no effect of the fields that an API has translated into those of a chat.

    Args:
        ignored: What has no effect in that chat.
        names: What the client calls a field of the chat, or a part of its path.
    """
    found = []
    for name in ignored:
        field, mark, keyword = name.partition("#")
        if field in (FIELD, "structured_outputs") or field.startswith("tools["):
            for ours, theirs in names.items():
                field = field.replace(ours, theirs)
            found.append(f"{field}{mark}{keyword}")
    return tuple(found)


def ignored_in_stream_options(body: Mapping[str, Any]) -> Iterator[str]:
    yield from ignored_members("stream_options", (body.get("stream_options"),), _STREAM_OPTIONS)


def ignored_in_chat(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the members of a chat's fields that have no effect, each once. The body was checked."""
    messages = body["messages"]
    found = [*ignored_in_stream_options(body)] if body.get("stream_options") else []
    found += ignored_members("messages[]", messages, _MESSAGE)
    for message in messages:
        if isinstance(parts := message.get("content"), list):
            found += ignored_members("messages[].content[]", parts, _PART)
            for part in parts:
                if isinstance(part, dict) and "image_url" in part:
                    found += ignored_members("messages[].content[].image_url", (part["image_url"],), _IMAGE)
    for field, known in (("reasoning", _REASONING), ("thinking", _THINKING)):
        if body.get(field):
            found += ignored_members(field, (body[field],), known)
    return tuple(dict.fromkeys(found)) if found else ()


FIELD = "response_format"
_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def read_response_format(value: object) -> types_pb2.StructuredOutputs | None:
    """The constraint, whose limits are not checked; None: any text.

    Raises :class:`errors.InvalidArgument` naming the field.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{FIELD} must be an object with a type", FIELD)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        if (schema := value.get("schema")) is None:
            return types_pb2.StructuredOutputs(json_object=True)
        if not isinstance(schema, Mapping):
            raise InvalidArgument(f"{FIELD}: schema must be a JSON schema, an object", FIELD)
        return json_schema_constraint(schema, FIELD)
    if kind == "structural_tag":
        return structural_tag_constraint(dict(value), FIELD)
    if kind != "json_schema":
        raise InvalidArgument(f"{FIELD}: type must be one of {', '.join(_TYPES)}, not {kind!r:.64}", FIELD)
    wrapped = value.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidArgument(f'{FIELD}: json_schema must be {{"name": …, "schema": {{…}}}}', FIELD)
    return json_schema_constraint(schema, FIELD)


def _is_strict(form: Mapping[str, Any]) -> bool:
    wrapped = form.get("json_schema")
    return isinstance(wrapped, Mapping) and wrapped.get("strict") is True


log = logging.getLogger(__name__)

Body = Mapping[str, Any]

SAMPLING_FIELDS = SAMPLING_NAMES - {"logprobs"}
"""Sampling parameters that both endpoints spell like their table."""

NOT_SUPPORTED_YET: Mapping[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    "logprobs": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "chat_template": (None,),
    "add_special_tokens": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "logits_processors": (None, []),
    "mcp_servers": (None, []),
    "images": (None, []),
    "raw": (None, False),
}
"""Unsupported fields, with the values that are accepted because they have no effect."""

RENAMED: Mapping[str, str] = {
    f"guided_{kind}": f'structured_outputs: {{"{kind}": …}}' for kind in ("json", "regex", "choice", "grammar")
}
"""Unsupported old names of fields, and what to send instead."""

WITHOUT_EFFECT = IGNORED_FIELDS | {"parallel_tool_calls"}
"""Known fields that have no effect here."""

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How to shape the answer."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    return_timeline: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    """The client's own, to distinguish its stop reason from an end of sequence."""
    num_logprobs: int | None = None
    """Alternatives to return for each token; None: no log probabilities."""
    num_prompt_logprobs: int | None = None
    """Alternatives for each prompt token; None: the client did not request any."""
    tokens_as_ids: bool = False
    """Write tokens as ``token_id:…``."""
    shows_stop: bool = False
    """Keep in the text what ended it."""
    echo: bool = False
    """Put the prompt before the text."""
    echo_only: bool = False
    """Return only the prompt."""
    plan: MessagePlan | None = None
    """How to parse a chat's turns; None: as text."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that have no effect."""
    volatile: tuple[str, ...] = ()
    """Lines that were taken out of the system prompt or moved, by name."""
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the client calls a field, by our name, where both differ."""
    request: object = None
    """What an API keeps of the body for its answer."""
    event_ids: bool = False
    """Write an id into each event of the stream."""
    resumed: EventId | None = None
    """What the client has of the answer; None: it begins now."""
    numbered: NumberedEvent | None = None
    """What the client has of an answer whose events are numbered; None: they are not."""
    created: int = 0
    """When the answer began, in seconds since the epoch; 0: now, or with what the client has of it."""

    @classmethod
    def of(cls, fields: CommonFields, sampling: types_pb2.SamplingParams, **own: Any) -> "AnswerOptions":
        """``own`` holds options of the endpoint. Raises ``InvalidArgument`` for stream options without a stream."""
        stream = bool(fields.stream)
        if fields.stream_options is not None and not stream:
            raise errors.InvalidArgument("stream_options is only allowed with stream", "stream_options")
        if stream and sampling.HasField("prompt_logprobs"):
            raise errors.InvalidArgument("prompt_logprobs are not available in a stream", "prompt_logprobs")
        options = fields.stream_options or StreamOptions()
        return cls(
            stream=stream,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(fields.return_token_ids),
            return_timeline=bool(fields.return_timeline),
            stop=() if fields.stop is None else tuple(_stop_strings(fields.stop)),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            num_prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            tokens_as_ids=bool(fields.return_tokens_as_token_ids),
            shows_stop=fields.include_stop_str_in_output is True,
            **own,
        )


def renamed_twice(inner: Mapping[str, str], outer: Mapping[str, str]) -> dict[str, str]:
    """Return what the client calls a field, by our name. ``inner``: what a chat calls it; ``outer``: what the client
    calls the field of a chat."""
    return dict(outer) | {name: outer.get(chats, chats) for name, chats in inner.items()}


class BodyReader:
    """Reads bodies; logs each unknown field once."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._warned: set[str] = set()  # bounded below

    def read(self, body: Body, model: type[Fields]) -> Fields:
        """Return the gateway's own fields. Raises :class:`errors.InvalidArgument` naming the field."""
        if others := body.keys() - _known_fields(model):
            self._check_others(body, [name for name in body if name in others])
        try:
            return msgspec.convert(body, model)
        except msgspec.ValidationError as error:
            raise _invalid(error) from None

    def ignored(self, body: Body, model: type[msgspec.Struct]) -> tuple[str, ...]:
        """Return the names of a body's fields that have no effect."""
        others = (body.keys() - _effective_fields(model)) - NOT_SUPPORTED_YET.keys()
        return tuple(name for name in body if name in others and body[name] is not None) if others else ()

    def _check_others(self, body: Body, names: Iterable[str]) -> None:
        """Check fields of other endpoints, obsolete fields and unknown ones."""
        for name in names:
            if name in NOT_SUPPORTED_YET:
                _check_neutral(name, body[name], NOT_SUPPORTED_YET[name])
                continue
            if name in RENAMED:
                # Clients of several versions of vLLM send the constraint under both names.
                if body[name] is not None and body.get("structured_outputs") is None:
                    raise errors.InvalidArgument(f"{name} is not supported; send {RENAMED[name]}", name)
                continue
            if self._strict:
                raise errors.InvalidArgument(f"{name[:64]}: unknown field", name[:64])
            name = name[:64]
            if name not in self._warned and len(self._warned) < 256:
                self._warned.add(name)
                log.warning("ignoring the unknown request field %r", name)


def sampling_params(body: Body, **own: object) -> tuple[types_pb2.SamplingParams, tuple[str, ...]]:
    """Return a body's sampling parameters and ``response_format``, and the keywords of its schema that do not bind the
    output; ``own`` holds parameters with other spellings."""
    values: dict[str, object] = {}
    for name in body:
        if name in SAMPLING_FIELDS:
            values[name] = body[name]
    if "extra_args" in own and values.get("extra_args") is not None:
        raise errors.InvalidArgument("extra_args and vllm_xargs are two names of one field; send one", "extra_args")
    sampling = narrow_sampling(values | own)
    form = body.get("response_format")
    if form is not None and (constraint := read_response_format(form)) is not None:
        if sampling.HasField("structured_outputs"):
            raise errors.InvalidArgument("response_format and structured_outputs cannot be combined", "response_format")
        lost = relax(constraint, FIELD, strict=_is_strict(form))
        sampling.structured_outputs.CopyFrom(constraint)
        return sampling, lost
    if "structured_outputs" in body and sampling.HasField("structured_outputs"):
        return sampling, relax(sampling.structured_outputs)
    return sampling, ()


def make_generate_request(
    fields: CommonFields,
    prompts: Chat | Sequence[str | Sequence[object] | EmbeddedPrompt],
    prompt_field: str,
    sampling: types_pb2.SamplingParams,
    tenant: Tenant,
    **own: Any,
) -> GenerateRequest:
    """Return what the body asks for; ``own`` holds what only the endpoint has."""
    interval, keep = fields.stream_interval, fields.truncate_prompt_tokens
    text = output_processor_pb2.TextOptions(
        stop=None if fields.stop is None else _stop_strings(fields.stop),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens,
        spaces_between_special_tokens=fields.spaces_between_special_tokens,
        detokenize=fields.detokenize,
        stream_interval=0 if interval is None else narrow("stream_interval", interval),
    )
    return GenerateRequest(
        prompts,
        prompt_field,
        sampling,
        text,
        tenant=tenant,
        ignore_eos=bool(fields.ignore_eos),
        priority=fields.priority or 0,
        ttft_deadline=fields.ttft_deadline,
        num_samples=1 if fields.n is None else narrow("n", fields.n),
        beam_search=_beam_search(fields) if fields.use_beam_search or fields.length_penalty is not None else None,
        bad_words=fields.bad_words or (),
        own_salt=fields.cache_salt or "",
        session=fields.prompt_cache_key or "",
        truncate_prompt_tokens=None if keep is None else narrow_int("truncate_prompt_tokens", keep, -1, 2**32 - 1),
        **own,
    )


def _beam_search(fields: CommonFields) -> BeamOptions | None:
    """Return how to search; None: the outputs are sampled."""
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1.0):
            raise errors.InvalidArgument("length_penalty needs use_beam_search", "length_penalty")
        return None
    for name in ("stream", "return_timeline", TTFT_DEADLINE):
        if getattr(fields, name):
            raise errors.InvalidArgument(f"{name} is not available with use_beam_search", name)
    return BeamOptions() if fields.length_penalty is None else BeamOptions(fields.length_penalty)


def _stop_strings(stop: str | list[str]) -> list[str]:
    strings = [stop] if isinstance(stop, str) else stop
    check_stop_count(len(strings))
    return strings


@functools.cache  # once for each endpoint
def _effective_fields(model: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(model.__struct_fields__) | SAMPLING_FIELDS | {"response_format"}


@functools.cache  # once for each endpoint
def _known_fields(model: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(model.__struct_fields__) | SAMPLING_FIELDS | WITHOUT_EFFECT


def _check_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    if any(value == allowed and type(value) is type(allowed) for allowed in neutral):
        return
    raise errors.InvalidArgument(f"{name} is not supported yet", name)


def _invalid(error: msgspec.ValidationError) -> errors.InvalidArgument:
    """Split msgspec's message: ``Expected `str`, got `int` - at `$.stop[0]```; the field is ``stop``."""
    message, _, path = str(error).partition(" - at `$.")
    where = path.rstrip("`").replace("[...]", "")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", message):
        where = f"{where}.{missing[1]}" if where else missing[1]
        message = "is required"
    field = re.sub(r"\[\d+\]$", "", where) or None
    return errors.InvalidArgument(f"{where}: {message}" if where else message, field)


KEY_FIELD = "Idempotency-Key"
"""Names a request, so that a client may repeat it safely."""
_NO_IDS = (
    "the events of this API's streams have no ids: send an Idempotency-Key; a repeat with the same key gets the answer "
    "from its beginning"
)


def read_claim(
    headers: Mapping[bytes, bytes], digest: bytes, request: GenerateRequest, options: AnswerOptions, kind: IdKind
) -> tuple[AnswerOptions, ResumeToken]:
    """Return the options of a call, and by which token it resumes a stream or repeats a request, as its headers ask.

    ``digest``: of path and body: the same JSON at another endpoint is another request. ``kind``: of the API's ids.
    Raises ``InvalidArgument`` for a header that is malformed, or that the request cannot have.
    """
    last_id, key = headers.get(b"last-event-id"), headers.get(b"idempotency-key")
    token = NEW if key is None else token_of_key(request.tenant.name, key.decode("latin-1"), digest, KEY_FIELD)
    if last_id is None:
        return options, token
    if kind is IdKind.NONE:
        raise errors.InvalidArgument(_NO_IDS, EVENT_FIELD)
    text = last_id.decode("latin-1").strip()
    if text not in NO_EVENT:
        if not options.stream:
            raise errors.InvalidArgument(
                f"{EVENT_FIELD} resumes streams only: the body must have stream set to true", EVENT_FIELD
            )
        return _resumed(text, digest, request, options, kind)
    if not options.stream or num_outputs_of(request) > MAX_OUTPUTS:
        return options, token
    token = token if token.fingerprint else ResumeToken(fingerprint=digest)
    if kind is IdKind.NUMBER:
        return dataclasses.replace(options, numbered=NumberedEvent(created=int(time.time()))), token
    return dataclasses.replace(options, event_ids=True), token


def _resumed(
    text: str, digest: bytes, request: GenerateRequest, options: AnswerOptions, kind: IdKind
) -> tuple[AnswerOptions, ResumeToken]:
    """Return the options and the token of a stream that continues after the event with this id."""
    if kind is IdKind.NUMBER:
        last = parse_numbered_id(text)
        token = ResumeToken(last.request_id, digest, resumes=True, num_delivered=(last.num_tokens,))
        return dataclasses.replace(options, numbered=last), token
    event = parse_event_id(text)
    if len(event.entries) and max(event.entries) >= num_outputs_of(request):
        raise errors.InvalidArgument(
            f"{EVENT_FIELD} is of an answer with more outputs than the body asks for", EVENT_FIELD
        )
    token = ResumeToken(event.request_id, digest, resumes=True, num_delivered=tokens_of(event.positions))
    return dataclasses.replace(options, event_ids=True, resumed=event), token


def num_outputs_of(request: GenerateRequest) -> int:
    """Return how many outputs a request asks for."""
    return (1 if isinstance(request.prompts, Chat) else len(request.prompts)) * request.num_samples
