"""Reads and writes tensors of the Open Inference Protocol: texts and booleans."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.kserve import grpc_service_pb2 as pb

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
