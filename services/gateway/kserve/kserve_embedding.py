"""Requests of the Open Inference Protocol for vectors: texts in, a tensor of numbers out."""

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_int
from tokenloom.v1 import types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as pb

from ..generation.running_pooling import RunningPooling
from ..pooling.vector_json import numbers
from ..records.generate_request import GenerateRequest
from ..records.model_names import NamedAdapter
from ..records.pooling_input import PoolingInput, check_count
from ..tenants.tenant import Tenant
from .kserve_inference import check_version, text
from .kserve_tensors import read_inputs

EMBEDDING = "embedding"
"""Name of the output: FP32, [texts, numbers]."""
_PARAMETERS = ("dimensions", "normalize", "truncate_prompt_tokens")


def asks_for_embedding(request: pb.ModelInferRequest, limits: types_pb2.ModelLimits | None) -> bool:
    """Return whether a request asks for vectors: it names the output, or the model generates no text."""
    if any(output.name == EMBEDDING for output in request.outputs):
        return True
    return limits is not None and limits.HasField("generates") and not limits.generates


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
    for name in values:
        if name not in _PARAMETERS:
            raise InvalidArgument(f"{name[:64]} is not a parameter of embeddings: {', '.join(_PARAMETERS)}", name[:64])
    dimensions, keep = values.get("dimensions"), values.get("truncate_prompt_tokens")
    normalize = values.get("normalize")
    if normalize is not None and not isinstance(normalize, bool):
        raise InvalidArgument("normalize must be a boolean", "normalize")
    job = GenerateRequest(
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
    return PoolingInput(job, params)


def write_embedding(response: pb.ModelInferResponse, pooling: RunningPooling, *, raw: bool) -> None:
    """Add the tensor. ``raw``: as raw bytes."""
    results = pooling.results
    tensor = response.outputs.add(name=EMBEDDING, datatype="FP32", shape=[len(results), *results[0].shape])
    if raw:
        response.raw_output_contents.append(b"".join(result.data for result in results))
        return
    for result in results:
        tensor.contents.fp32_contents.extend(numbers(result.data))
