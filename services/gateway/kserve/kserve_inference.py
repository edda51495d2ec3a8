"""Requests of the Open Inference Protocol, read as completions or embeddings with the same fields and checks, and their
tensors of texts, booleans and numbers."""

import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenloom.request.errors import InvalidArgument, NotFound
from tokenloom.request.narrowing import narrow_int
from tokenloom.v1 import types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as pb

from ..generation.running_pooling import RunningPooling
from ..http.request_body import decode_object
from ..openai.completions import CompletionsApi
from ..openai.event_ids import MAX_OUTPUTS, EventId, EventIds, parse_event_id
from ..pooling.vector_json import numbers
from ..records.generate_request import GenerateRequest
from ..records.model_names import NamedAdapter
from ..records.pooling_input import PoolingInput, check_count
from ..records.request_ids import NEW, ResumeToken, fingerprint, token_of_key, tokens_of
from ..tenants.tenant import Tenant

VERSION = "1"
"""The version of every model."""
INPUTS = {"text_input": "BYTES", "sampling_parameters": "BYTES", "stream": "BOOL", "exclude_input_in_output": "BOOL"}
OUTPUTS = ("text_output", "finish_reason")
_NOT_IN_TENSORS = (
    "logprobs",
    "prompt_logprobs",
    "return_routed_experts",
    "return_token_ids",
    "return_timeline",
    "stream_options",
)
_OF_TRITON = frozenset({"triton_enable_empty_final_response"})
_MAX_TIMEOUT_US = 2**62
_MAX_PARAMETER_BYTES = 128 << 10
"""Limits the JSON of sampling parameters, which is decoded in the event loop."""


@dataclass(frozen=True, slots=True)
class Inference:
    """One request."""

    generate_request: GenerateRequest
    stream: bool
    outputs: Sequence[str]
    """Names of the tensors to return, in order."""
    raw: bool
    """Whether tensors are sent as raw bytes, both ways."""
    ignored: Sequence[str]
    """Names of what has no effect."""
    field_names: Mapping[str, str]
    """What the client calls a field, by our name, where both differ."""
    token: ResumeToken = NEW
    """Which request of the mesh it is."""
    resumed: EventId | None = None
    """What the client has of the answer; None: it begins now."""

    def ids(self, request_id: str, num_outputs: int) -> EventIds | None:
        """Return what makes the ids of a stream's responses, by which the client resumes it; None: it cannot."""
        if not self.token.fingerprint or num_outputs > MAX_OUTPUTS:
            return None
        if (resumed := self.resumed) is None:
            return EventIds(request_id, int(time.time()), num_outputs)
        ids = EventIds(request_id, resumed.created, num_outputs)
        for index in resumed.entries:
            ids.restore(resumed, index)
        return ids


def read_inference(
    request: pb.ModelInferRequest, api: CompletionsApi, tenant: Tenant, time_remaining: float | None
) -> Inference:
    """Read a request. Raises ``InvalidArgument`` naming the tensor or parameter. ``time_remaining``: seconds."""
    check_version(request.model_version)
    inputs = read_inputs(request, INPUTS)
    if not inputs.get("text_input"):
        raise InvalidArgument("inputs: the tensor text_input is missing or empty", "text_input")
    values = _values(inputs.get("sampling_parameters"), request)
    timeout = values.pop("timeout", None)
    # A limit beyond the room in the context is cut, as Triton's clients send the same one with every text. A search
    # with beams is planned by it.
    limit = None if values.get("use_beam_search") else values.pop("max_tokens", None)
    longest = 0 if limit is None else narrow_int("max_tokens", limit, 1, 2**32 - 1)
    excluded = _flag(inputs, "exclude_input_in_output", default=True)
    body = {**values, "prompt": [text("text_input", value) for value in inputs["text_input"]], "echo": not excluded}
    generate_request, options = api.read(body, tenant)
    stream = _flag(inputs, "stream", default=False)
    if stream and generate_request.beam_search is not None:
        raise InvalidArgument("stream is not available with use_beam_search", "stream")
    token, resumed = _claim(request, tenant)
    if resumed is not None and not stream:
        raise InvalidArgument(f"{LAST_EVENT_ID} resumes streams only: the tensor stream must be true", LAST_EVENT_ID)
    num_outputs = len(inputs["text_input"]) * generate_request.num_samples
    if resumed is not None and max(resumed.entries, default=0) >= num_outputs:
        raise InvalidArgument(f"{LAST_EVENT_ID} is of an answer with more outputs", LAST_EVENT_ID)
    return Inference(
        replace(
            generate_request, prompt_field="text_input", timeout=_sooner(time_remaining, timeout), most_tokens=longest
        ),
        stream=stream,
        outputs=_outputs(request),
        raw=bool(request.raw_input_contents),
        ignored=options.ignored,
        field_names=options.field_names,
        token=token,
        resumed=resumed,
    )


_RESUMABLE = "resumable"
LAST_EVENT_ID, EVENT_ID = "last_event_id", "event_id"
"""Parameters: of a request, which response was the client's last; of each response of a stream, its id."""
_CLAIM = {_RESUMABLE: "bool_param", LAST_EVENT_ID: "string_param"}
"""The parameters that ask for a stream which can be resumed, or resume it, and their types."""


def _claim(request: pb.ModelInferRequest, tenant: Tenant) -> tuple[ResumeToken, EventId | None]:
    """Return by which token a request is resumed or repeated, and what its client has of the answer. Raises
    ``InvalidArgument``."""
    kinds = {
        name: request.parameters[name].WhichOneof("parameter_choice") for name in _CLAIM if name in request.parameters
    }
    for name, kind in kinds.items():
        if kind != _CLAIM[name]:
            raise InvalidArgument(f"{name} must be set as {_CLAIM[name]}", name)
    is_resumable = _RESUMABLE in kinds and request.parameters[_RESUMABLE].bool_param
    last_id = request.parameters[LAST_EVENT_ID].string_param if LAST_EVENT_ID in kinds else None
    if not is_resumable:
        if last_id is not None:
            raise InvalidArgument(f"{LAST_EVENT_ID} needs {_RESUMABLE}, as the request was sent first", LAST_EVENT_ID)
        return NEW, None
    body = pb.ModelInferRequest()
    body.CopyFrom(request)
    if last_id is not None:
        del body.parameters[LAST_EVENT_ID]
    digest = fingerprint("ModelInfer", body.SerializeToString(deterministic=True))
    if last_id is None:
        new = ResumeToken(fingerprint=digest)
        return token_of_key(tenant.name, request.id, digest, "id") if request.id else new, None
    try:
        resumed = parse_event_id(last_id)
    except InvalidArgument:
        message = f"{LAST_EVENT_ID} is not the {EVENT_ID} of a response to this request"
        raise InvalidArgument(message, LAST_EVENT_ID) from None
    delivered = tokens_of(resumed.positions)
    return ResumeToken(resumed.request_id, digest, resumes=True, num_delivered=delivered), resumed


def check_version(version: str) -> None:
    """Raise ``NotFound`` for a version that is not served."""
    if version not in ("", VERSION):
        raise NotFound(f"version {version[:16]!r} of the model is not served; the only version is {VERSION!r}")


def _values(json: Sequence[object] | None, request: pb.ModelInferRequest) -> dict[str, Any]:
    """Return the fields of a completion's body."""
    values: dict[str, Any] = {}
    if json:
        data = _single("sampling_parameters", json)
        assert isinstance(data, bytes)
        if len(data) > _MAX_PARAMETER_BYTES:
            message = f"sampling_parameters has {len(data)} bytes; at most {_MAX_PARAMETER_BYTES} are allowed"
            raise InvalidArgument(message, "sampling_parameters")
        values |= decode_object(data)
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None and name not in _OF_TRITON and name not in _CLAIM:
            values[name] = getattr(parameter, kind)
    for name in ("prompt", "echo", "stream", "model", "prompt_embeds"):
        if name in values:
            raise InvalidArgument(f"{name} is not a parameter here: send it as a tensor or as model_name", name)
    for name in _NOT_IN_TENSORS:
        if values.get(name) not in (None, False):
            raise InvalidArgument(f"{name} is not supported: the response's tensors hold only text", name)
    return values


def _outputs(request: pb.ModelInferRequest) -> Sequence[str]:
    names = [output.name for output in request.outputs]
    for name in names:
        if name not in OUTPUTS:
            raise InvalidArgument(f"outputs: unknown tensor {name[:64]!r}; known are {', '.join(OUTPUTS)}", "outputs")
    return names or OUTPUTS


def _sooner(time_remaining: float | None, timeout_us: object) -> float | None:
    if timeout_us is None:
        return time_remaining
    seconds = narrow_int("timeout", timeout_us, 1, _MAX_TIMEOUT_US) / 1e6
    return seconds if time_remaining is None else min(seconds, time_remaining)


def _flag(inputs: Any, name: str, *, default: bool) -> bool:
    return bool(_single(name, inputs[name])) if name in inputs else default


def _single(name: str, values: Sequence[object]) -> object:
    if len(values) != 1:
        raise InvalidArgument(f"{name} must have one element, not {len(values)}", name)
    return values[0]


def text(name: str, value: object) -> str:
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{name} is not UTF-8", name) from None


EMBEDDING = "embedding"
"""Name of the output: FP32, [texts, numbers]."""
_PARAMETERS = ("dimensions", "normalize", "truncate_prompt_tokens")


def asks_for_embedding(request: pb.ModelInferRequest, limits: types_pb2.ModelLimits) -> bool:
    """Return whether a request asks for vectors: it names the output, or the model generates no text."""
    if any(output.name == EMBEDDING for output in request.outputs):
        return True
    return limits.HasField("generates") and not limits.generates


def read_embedding(
    request: pb.ModelInferRequest, tenant: Tenant, adapter: NamedAdapter | None, time_remaining: float | None
) -> PoolingInput:
    """Read a request. Raises ``InvalidArgument`` naming the tensor or parameter. ``time_remaining``: seconds."""
    check_version(request.model_version)
    texts = read_inputs(request, {"text_input": "BYTES"}).get("text_input", ())
    check_count(len(texts), "text_input")
    for output in request.outputs:
        if output.name != EMBEDDING:
            raise InvalidArgument(f"outputs: unknown tensor {output.name[:64]!r}; known is {EMBEDDING}", "outputs")
    kinds = {name: (each, each.WhichOneof("parameter_choice")) for name, each in request.parameters.items()}
    values = {name: getattr(each, kind) for name, (each, kind) in kinds.items() if kind is not None}
    values.pop(_RESUMABLE, None)  # a repeat computes the same vectors: there is nothing to resume
    for name in values:
        if name not in _PARAMETERS:
            raise InvalidArgument(f"{name[:64]} is not a parameter of embeddings: {', '.join(_PARAMETERS)}", name[:64])
    dimensions, keep = values.get("dimensions"), values.get("truncate_prompt_tokens")
    normalize = values.get("normalize")
    if normalize is not None and not isinstance(normalize, bool):
        raise InvalidArgument("normalize must be a boolean", "normalize")
    generate_request = GenerateRequest(
        [text("text_input", each) for each in texts],
        "text_input",
        types_pb2.SamplingParams(),
        tenant=tenant,
        adapter=adapter,
        truncate_prompt_tokens=None if keep is None else narrow_int("truncate_prompt_tokens", keep, -1, 2**32 - 1),
        timeout=time_remaining,
    )
    params = types_pb2.PoolingParams(
        task=types_pb2.POOLING_TASK_EMBED,
        dimensions=None if dimensions is None else narrow_int("dimensions", dimensions, 1, 2**32 - 1),
        use_activation=normalize,
    )
    return PoolingInput(generate_request, params)


def write_embedding(response: pb.ModelInferResponse, pooling: RunningPooling, *, raw: bool) -> None:
    """Add the tensor. ``raw``: as raw bytes."""
    results = pooling.results
    tensor = response.outputs.add(name=EMBEDDING, datatype="FP32", shape=[len(results), *results[0].shape])
    if raw:
        response.raw_output_contents.append(b"".join(result.data for result in results))
        return
    for result in results:
        tensor.contents.fp32_contents.extend(numbers(result.data))


InputTensor = pb.ModelInferRequest.InferInputTensor
Values = Sequence[bytes] | Sequence[bool]

_LENGTH = struct.Struct("<I")


def read_inputs(request: pb.ModelInferRequest, datatypes: Mapping[str, str]) -> dict[str, Values]:
    """Return the elements of each input. ``datatypes``: of the known inputs, by name.

    Raises ``InvalidArgument`` naming the tensor.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        message = f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs"
        raise InvalidArgument(message, "raw_input_contents")
    found: dict[str, Values] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name[:64]
        expected = datatypes.get(name)
        if expected is None:
            raise InvalidArgument(f"inputs: unknown tensor {name!r}; known are {', '.join(datatypes)}", "inputs")
        if tensor.datatype != expected:
            raise InvalidArgument(f"{name} must have the datatype {expected}, not {tensor.datatype[:16]!r}", name)
        values = _raw(name, expected, raw[index]) if raw else _typed(tensor)
        if min(tensor.shape, default=1) < 0 or math.prod(tensor.shape) != len(values):
            raise InvalidArgument(f"{name} has {len(values)} elements, but shape {list(tensor.shape)[:8]}", name)
        found[name] = values
    return found


def write_output(
    response: pb.ModelInferResponse, name: str, texts: Sequence[str], *, raw: bool, index: int | None = None
) -> None:
    """Add a tensor of texts. ``index``: position of the only text, in a stream."""
    tensor = response.outputs.add(name=name, datatype="BYTES", shape=[len(texts)])
    if index is not None:
        tensor.parameters["index"].int64_param = index
    values = [text.encode() for text in texts]
    if raw:
        response.raw_output_contents.append(b"".join(_LENGTH.pack(len(value)) + value for value in values))
    else:
        tensor.contents.bytes_contents.extend(values)


def _typed(tensor: InputTensor) -> Values:
    if tensor.datatype == "BOOL":
        return list(tensor.contents.bool_contents)
    return list(tensor.contents.bytes_contents)


def _raw(name: str, datatype: str, data: bytes) -> Values:
    if datatype == "BOOL":
        return [byte != 0 for byte in data]
    return list(_split(name, data))


def _split(name: str, data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(data, at)[0] if start <= len(data) else start
        if at > len(data):
            raise InvalidArgument(f"{name}: the raw contents end within an element", name)
        yield data[start:at]
