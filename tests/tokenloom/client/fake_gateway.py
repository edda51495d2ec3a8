"""Gateways that answer with a known text, and that are lost in the middle of it."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import inference_pb2_grpc, types_pb2

TEXT = "abcdefghij"


class FakeMesh:
    """What the gateways share: the requests that are kept, by id, and the calls that were made."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.by_key: dict[str, str] = {}
        self.calls: list[str] = []
        self.resumed: list[pb.InferenceResumeRequest] = []


class FakeGateway(inference_pb2_grpc.InferenceServicer):
    """Writes one character of each sample at a time, and none from the ``stops_at``-th response on."""

    def __init__(self, mesh: FakeMesh, path: Path, *, stops_at: int | None = None) -> None:
        self.address = f"unix:{path}"
        self.stopped = asyncio.Event()
        self._mesh = mesh
        self._stops_at = stops_at
        self._server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)

    async def __aenter__(self) -> "FakeGateway":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        """End every call without a status of ours, as the end of the process does."""
        await self._server.stop(None)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        key = dict(context.invocation_metadata())["idempotency-key"]
        request_id = self._mesh.by_key.setdefault(key, f"request-{len(self._mesh.by_key)}")
        self._mesh.calls.append(f"Generate {request_id}")
        self._mesh.kept.add(request_id)
        await self._write(request, request_id, {}, context)

    async def Resume(self, request: pb.InferenceResumeRequest, context: Any) -> None:  # type: ignore[override]
        self._mesh.calls.append(f"Resume {request.request_id}")
        self._mesh.resumed.append(request)
        if request.request_id not in self._mesh.kept:
            error = errors.NotFound("The request is not known.")
            error.reason = "REQUEST_LOST"
            await wire_errors.abort(context, error)
        await self._write(request.request, request.request_id, {p.index: p for p in request.positions}, context)

    async def _write(
        self, request: pb.GenerateRequest, request_id: str, had: dict[int, pb.OutputPosition], context: Any
    ) -> None:
        count = 0
        for at, char in enumerate(TEXT):
            for index in range(max(request.n, 1)):
                if at < had.get(index, pb.OutputPosition()).num_tokens:
                    continue
                if count == self._stops_at:
                    self.stopped.set()
                    await asyncio.Event().wait()
                count += 1
                await context.write(_response(request_id, index, at, char))


def _response(request_id: str, index: int, at: int, char: str) -> pb.GenerateResponse:
    is_last = at == len(TEXT) - 1
    return pb.GenerateResponse(
        request_id=request_id,
        index=index,
        text=char,
        text_length=at + 1,
        token_ids=[ord(char)],
        token_index=at,
        finish_reason=types_pb2.FINISH_REASON_STOP if is_last else types_pb2.FINISH_REASON_UNSPECIFIED,
        usage=pb.Usage(prompt_tokens=1, completion_tokens=len(TEXT)) if is_last else None,
    )
