"""An output processor's end of a Connect stream, and engines in this event loop to talk to."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from tests.engine_core.client.inproc import AsyncInprocClient
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request import logprob_columns
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.engine_pb2 import AddRequest, EngineFrame, EngineInput, Finished
from tokenloom.v1.engine_pb2_grpc import EngineStub
from tokenloom.v1.types_pb2 import Hello, Logprobs, Prompt, SamplingParams

STEP_SECONDS = 0.002
VOCAB_SIZE: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]


def make_settings(directory: Path, **changes: Any) -> EngineSettings:
    """A small engine over the hash worker, with the demo model's vocabulary and context."""
    values = {
        "worker": "hash",
        "listen": f"unix:{directory}/engine",
        "metrics_listen": "",
        "hash_step_seconds": STEP_SECONDS,
        "block_size": 4,
        "num_kv_blocks": 600,
        "frame_interval": 0.0,
        "drain_timeout": 30.0,
    }
    return EngineSettings.of(**{**values, **changes})


def make_service(settings: EngineSettings, worker: type[HashWorker] = HashWorker) -> EngineService:
    """An engine whose core runs in this process."""
    config = settings.engine_config(str(DEMO_MODEL))
    return EngineService(settings, AsyncInprocClient(config, UniProcExecutor(worker(config))))


@asynccontextmanager
async def running_engine(settings: EngineSettings, worker: type[HashWorker] = HashWorker) -> AsyncIterator[Host]:
    async with running(make_service(settings, worker), settings) as host:
        yield host


def make_add(slot: int, prompt: Sequence[int], max_tokens: int | None = 5, **fields: Any) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return AddRequest(
        slot=slot,
        request_id=f"request-{slot}",
        prompt=Prompt(token_ids=prompt),
        **{"sampling_params": params, **fields},
    )


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


@dataclass
class Received:
    """What came, frame by frame, checked against the contract."""

    frames: list[EngineFrame] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    first_index: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)

    def take(self, frame: EngineFrame) -> None:
        self.frames.append(frame)
        assert len(set(frame.slot)) == len(frame.slot), "a slot twice in a frame"
        counts = list(frame.num_tokens) or [1] * len(frame.slot)
        assert len(frame.token_index) == len(counts) == len(frame.slot)
        assert sum(counts) == len(frame.token_ids)
        self._take_logprobs(frame)
        token_ids = iter(frame.token_ids)
        for slot, index, count in zip(frame.slot, frame.token_index, counts, strict=True):
            assert slot not in self.finished, "tokens after the end"
            first = self.first_index.setdefault(slot, index)
            known = self.token_ids.setdefault(slot, [])
            assert index == first + len(known), "a gap or an overlap"
            known += [next(token_ids) for _ in range(count)]
        for finished in frame.finished:
            assert finished.slot not in self.finished, "finished twice"
            self.finished[finished.slot] = finished

    def _take_logprobs(self, frame: EngineFrame) -> None:
        counts = dict(zip(frame.slot, frame.num_tokens or [1] * len(frame.slot), strict=True))
        indices = dict(zip(frame.slot, frame.token_index, strict=True))
        for each in frame.logprobs:
            assert logprob_columns.fit_together(each.logprobs)
            assert each.slot not in self.finished, "log probabilities after the end"
            known = self.prompt_logprobs if each.prompt else self.logprobs
            if each.prompt:
                assert each.slot not in self.token_ids, "the prompt after the first token"
                told = logprob_columns.num_positions(known[each.slot]) if each.slot in known else 0
                assert each.token_index == 1 + told
            else:
                assert each.token_index == indices[each.slot]
                assert logprob_columns.num_positions(each.logprobs) == counts[each.slot]
            logprob_columns.extend(known.setdefault(each.slot, Logprobs(top=each.logprobs.top)), each.logprobs)


class Peer:
    """Opens a stream on entry; cancels it on exit."""

    def __init__(self, address: str, *, credit: int = 10_000, **hello: Any) -> None:
        self.hello: Hello = make_hello("output-processor-0", 1, initial_credit=credit, **hello)
        self.received = Received()
        self._channel = open_channel(address)
        self.call: grpc.aio.StreamStreamCall[EngineInput, EngineFrame]
        # On a busy machine a connection can take longer than one attempt may, which would end the call.
        self.call = EngineStub(self._channel).Connect(wait_for_ready=True)

    async def __aenter__(self) -> Self:
        await self.call.write(EngineInput(hello=self.hello))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.call.cancel()
        await self._channel.close()

    async def send(self, *adds: AddRequest, **fields: Any) -> None:
        await self.call.write(EngineInput(add=adds, **fields))

    async def read(self) -> EngineFrame | None:
        """The next frame; None at the stream's end."""
        async with asyncio.timeout(30):
            frame = await self.call.read()
        if not isinstance(frame, EngineFrame):
            return None
        self.received.take(frame)
        return frame

    async def read_until_finished(self, slots: Iterable[int]) -> Received:
        while not set(slots) <= self.received.finished.keys():
            assert await self.read() is not None, "the stream ended"
        return self.received

    async def read_tokens(self) -> EngineFrame:
        """The next frame with tokens."""
        while (frame := await self.read()) is not None:
            if frame.slot:
                return frame
        raise AssertionError("the stream ended")

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Reads to the end; how the stream ended."""
        try:
            while await self.read() is not None:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await self.call.code(), await self.call.details()
