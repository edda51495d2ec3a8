"""Gives weights to an engine of this program or to those of a mesh, as a safetensors file, and makes such files."""

import asyncio
import json
import os
import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenloom.model_files.staged_weights import (
    NUM_KEPT,
    StagedWeights,
    locked_folder,
    read_specs,
    remove_if_unlocked,
)

if TYPE_CHECKING:
    from torch import Tensor

    from tokenloom.request.errors import TokenloomError
    from tokenloom.services.runtime.peers.channels import Channels
    from tokenloom.v1.coordinator_pb2 import EngineIdentity

PIECE_BYTES = 4 << 20
_LOOK_SECONDS = 60.0
"""How long a mesh may take to say which engines it has: those of a new coordinator join it first."""
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = f"tokenloom-weights-{os.getuid()}-"
# By the ends of torch's names.
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
}


def tensor_file(tensors: "Mapping[str, Tensor]") -> Iterator[memoryview]:
    """Yield a safetensors file in pieces of at most :data:`PIECE_BYTES`, without a copy of all tensors. They may be on
    any device, and must not change meanwhile. Raises ``ValueError`` for a dtype that such files do not have."""
    import torch

    header, end = {}, 0
    for name, tensor in tensors.items():
        if (dtype := _DTYPES.get(str(tensor.dtype).removeprefix("torch."))) is None:
            raise ValueError(f"{name} is {tensor.dtype}: safetensors files have none of this dtype")
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # tensors are aligned, and read faster
    yield from _pieces(memoryview(struct.pack("<Q", len(head)) + head))
    for tensor in tensors.values():
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        yield from _pieces(flat.numpy().data)


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


class OwnWeights:
    """Keeps the weights that a program has given to its engine, in a folder that ends with this object."""

    def __init__(self, loaded: Path) -> None:
        """``loaded``: the checkpoint that the engine has. Raises ``TokenloomError`` as :class:`.StagedWeights`."""
        size = sum(spec.nbytes for spec in read_specs(loaded).values())
        folder, lock = _own_folder((NUM_KEPT + 1) * size)  # the next one comes before one is removed
        try:
            self._staged = StagedWeights(folder, loaded)
        except BaseException:
            _remove(folder, lock)
            raise
        self.close = weakref.finalize(self, _remove, folder, lock, self._staged)

    def write(self, tensors: "Mapping[str, Tensor]") -> Path:
        """Return a checkpoint with these tensors. Raises ``TokenloomError`` if they are not those of the loaded one, in
        names, dtypes and shapes, ``ValueError`` as :func:`tensor_file`."""
        incoming = self._staged.begin()
        try:
            for piece in tensor_file(tensors):
                incoming.write(piece)
            path, _ = incoming.finish()
        finally:
            incoming.discard()
        return path

    def use(self, path: Path) -> None:
        """Note that the engine has loaded a checkpoint."""
        self._staged.use(path)


async def send_weights(
    tensors: "Mapping[str, Tensor]", coordinator: str, *, certificates: str | os.PathLike[str] | None = None
) -> str:
    """Send weights to every engine of a running mesh, side by side (``EngineAdmin.StageWeights``), and return the path
    by which ``POST /reload_weights`` loads them. Its last part is their fingerprint in hexadecimal digits, of which
    answers name the first 16.

    Args:
        tensors: All of the checkpoint that the engines have loaded, by name, on any device, unchanged until this ends.
        coordinator: Its address, as ``tokenloom ps --wide`` shows it.
        certificates: Folder with ``ca.crt``, ``operator.crt`` and ``operator.key``; None: the mesh has none.

    Raises ``TokenloomError`` with the name of an engine that does not take them, or if the mesh has no engine or does
    not answer, ``ValueError`` as :func:`tensor_file` and for an empty address, and what reading a tensor raises. Then
    no engine loads anything, and the call may be repeated.
    """
    # Here: a program with an engine of its own needs none of them.
    from tokenloom.request.errors import FailedPrecondition
    from tokenloom.services.runtime.peers.callers import OPERATOR
    from tokenloom.services.runtime.peers.certificate_files import CertificateFiles
    from tokenloom.services.runtime.peers.channels import Channels
    from tokenloom.services.runtime.peers.tls import MeshTLS

    if not coordinator:
        raise ValueError("coordinator is empty; tokenloom ps --wide shows its address")
    next(tensor_file(tensors))  # a dtype that does not go is found here: within a call it would only cancel that
    tls = None
    if certificates is not None:
        folder = Path(certificates)
        cert, key = (folder / f"{OPERATOR}.{suffix}" for suffix in ("crt", "key"))
        tls = MeshTLS(CertificateFiles(folder / "ca.crt", cert, key, "certificates"))
    channels = Channels(tls)
    engines = await _engines_of(channels, coordinator)
    if not engines:
        raise FailedPrecondition(f"the mesh at {coordinator} has no engine that could take weights")
    sent = await asyncio.gather(*(_send(channels, engine, tensors) for engine in engines), return_exceptions=True)
    for each in sent:
        if isinstance(each, BaseException):
            raise each
    paths = {path: engine.engine_id for path, engine in zip(sent, engines, strict=True)}
    if len(paths) > 1:
        named = ", ".join(f"{engine}: {path}" for path, engine in paths.items())
        raise FailedPrecondition(f"the engines keep staged weights under different paths, which must be equal: {named}")
    return str(sent[0])


async def _engines_of(channels: "Channels", coordinator: str) -> "list[EngineIdentity]":
    """Return the engines that run. Raises ``TokenloomError`` if the coordinator does not say."""
    import grpc.aio

    from tokenloom.request import wire_errors
    from tokenloom.v1.coordinator_pb2 import EngineState, WatchRequest
    from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub

    async with channels.open(coordinator, "coordinator") as channel:
        try:
            async for snapshot in CoordinatorStub(channel).Watch(WatchRequest(), timeout=_LOOK_SECONDS):
                if snapshot.complete:
                    alive = (each for each in snapshot.engines if each.report.state != EngineState.ENGINE_STATE_DEAD)
                    return sorted((each.identity for each in alive), key=lambda engine: engine.engine_id)
        except grpc.aio.AioRpcError as error:
            raise _named(wire_errors.from_rpc(error), f"the coordinator at {coordinator}") from error
    return []


async def _send(channels: "Channels", engine: "EngineIdentity", tensors: "Mapping[str, Tensor]") -> str:
    """Send all tensors to one engine, and return the path that it answers."""
    import grpc.aio

    from tokenloom.request import wire_errors
    from tokenloom.v1.engine_pb2 import StageWeightsRequest
    from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

    failures: list[Exception] = []

    def stream() -> "Iterator[StageWeightsRequest]":
        try:
            for piece in tensor_file(tensors):
                yield StageWeightsRequest(data=bytes(piece))
        except Exception as error:  # of a tensor without data, or of its device: gRPC would only cancel the call
            failures.append(error)
            raise

    async with channels.open(engine.address, "engine") as channel:
        try:
            answer = await EngineAdminStub(channel).StageWeights(stream())
        except asyncio.CancelledError:
            if failures:
                raise failures[0] from None
            raise
        except grpc.aio.AioRpcError as error:
            raise _named(wire_errors.from_rpc(error), engine.engine_id) from error
    return str(answer.path)


def _named(error: "TokenloomError", name: str) -> "TokenloomError":
    """Name the part that has answered so in the message of its error, and return this."""
    error.message = f"{name}: {error.message}"
    error.args = (error.message,)
    return error


def _own_folder(num_bytes: int) -> tuple[Path, int]:
    """Make a folder, in memory where the system has a place for it with so much room, and return it with its lock.
    Remove those that processes of this user which were killed have left."""
    places = [Path(tempfile.gettempdir())]
    if os.access(_SHARED_MEMORY, os.W_OK):
        places.insert(0, _SHARED_MEMORY)
    for entry in [entry for place in places for entry in place.glob(f"{_PREFIX}*")]:
        remove_if_unlocked(entry)
    # A container has 64 MB of shared memory unless it is started with more.
    has_room = [place for place in places if shutil.disk_usage(place).free >= num_bytes]
    return locked_folder((has_room or places)[0], _PREFIX)


def _remove(folder: Path, lock: int, staged: StagedWeights | None = None) -> None:
    if staged is not None:
        staged.close()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
