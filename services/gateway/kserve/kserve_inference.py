"""Requests of the Open Inference Protocol, read as completions: with the same fields and checks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenloom.request.errors import InvalidArgument, NotFound
from tokenloom.request.narrowing import narrow_int
from tokenloom.v1.kserve import grpc_service_pb2 as pb

from ..http.json_body import decode_object
from ..openai.completions import CompletionsApi
from ..records.generate_request import GenerateRequest
from ..tenants.tenant import Tenant
from .kserve_tensors import read_inputs

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

    job: GenerateRequest
    stream: bool
    outputs: Sequence[str]
    """Names of the tensors to return, in order."""
    raw: bool
    """Whether tensors are sent as raw bytes, both ways."""


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
    job, _ = api.read(body, tenant)
    stream = _flag(inputs, "stream", default=False)
    if stream and job.beam_search is not None:
        raise InvalidArgument("stream is not available with use_beam_search", "stream")
    return Inference(
        replace(job, prompt_field="text_input", timeout=_sooner(time_remaining, timeout), most_tokens=longest),
        stream=stream,
        outputs=_outputs(request),
        raw=bool(request.raw_input_contents),
    )


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
        if kind is not None and name not in _OF_TRITON:
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
