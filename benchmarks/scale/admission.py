"""Measures the memory of an output processor that gets more long prompts than it has room for.

``python -m tokenloom.bench.scale.admission`` starts a coordinator and an output processor, joins an engine that reads
no request, so that every message to it waits in memory, and submits the prompts as a gateway does.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio

from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, EngineState
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import EngineFrame, EngineInput
from tokenloom.v1.engine_pb2_grpc import EngineServicer, add_EngineServicer_to_server
from tokenloom.v1.output_processor_pb2 import ProcessFrame, ProcessInput, Submit
from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorStub
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

PROMPTS_PER_MESSAGE = 32
"""Of 32 k tokens: the 4 MiB that a gateway sends in one message, at most."""
BEAT_SECONDS = 0.5
_VOCABULARY = 150_000
_START_SECONDS = 60.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """Holds what the output processor did with the prompts, and the most memory that it took, in bytes."""

    admitted: int
    refusals: dict[str, int]
    idle_bytes: int
    peak_bytes: int


class DeafEngine(EngineServicer):
    """Says hello, reads no request, and shows that it is alive."""

    async def Connect(
        self, request_iterator: AsyncIterator[EngineInput], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[EngineFrame]:
        await anext(aiter(request_iterator))
        yield EngineFrame(hello=make_hello("engine-0", 1))
        step = 0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            step += 1
            yield EngineFrame(step=step)


async def measure(prompts: int, prompt_tokens: int, max_prompt_bytes: int) -> Result:
    """Submit so many prompts of one length each to a new output processor."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        coordinator, output_processor = (f"unix:{directory}/{name}" for name in ("coordinator", "output-processor"))
        await stack.enter_async_context(_process("coordinator", "--listen", coordinator, "--metrics-listen", ""))
        options = ("--listen", output_processor, "--coordinator", coordinator, "--metrics-listen", "")
        limit = ("--max-prompt-bytes", str(max_prompt_bytes))
        part = await stack.enter_async_context(_process("output_processor", *options, *limit))
        await stack.enter_async_context(_joined_engine(directory, coordinator))
        channel = await stack.enter_async_context(open_channel(output_processor))
        call = await _opened(channel)
        idle = _memory(part.pid, "VmRSS")
        refusals = await _submit(call, prompts, prompt_tokens)
        return Result(prompts - refusals.total(), dict(refusals), idle, _memory(part.pid, "VmHWM"))


async def _opened(channel: grpc.aio.Channel) -> Any:
    """Return a stream to the output processor, which refuses streams while it starts."""
    async with asyncio.timeout(_START_SECONDS):
        while True:
            call: Any = OutputProcessorStub(channel).Process(wait_for_ready=True)
            try:
                await call.write(ProcessInput(hello=make_hello("gateway-0", 1, initial_credit=1 << 20)))
                await call.read()
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
            else:
                return call


async def _submit(call: Any, prompts: int, prompt_tokens: int) -> Counter[str]:
    """Return why prompts were refused. The engine answers none of the others."""
    random, refusals = Random(1), Counter[str]()
    token_ids = [random.randrange(_VOCABULARY) for _ in range(prompt_tokens)]
    reader = asyncio.create_task(_refusals(call, last_slot=prompts + 1, refusals=refusals))
    for begin in range(0, prompts, PROMPTS_PER_MESSAGE):
        message = ProcessInput()
        for slot in range(begin + 1, min(begin + PROMPTS_PER_MESSAGE, prompts) + 1):
            submit = message.submit.add(slot=slot, request_id=f"request-{slot}")
            submit.prompt.token_ids.extend(token_ids)
            submit.sampling_params.max_tokens = 1
        await call.write(message)
    # Slots are worked through in order, and this one has no task.
    await call.write(ProcessInput(submit=[Submit(slot=prompts + 1, request_id="last")]))
    await reader
    return refusals


async def _refusals(call: Any, last_slot: int, refusals: Counter[str]) -> None:
    while isinstance(frame := await call.read(), ProcessFrame):
        for finished in frame.finished:
            if finished.slot == last_slot:
                return
            refusals[finished.error.reason] += 1
    raise RuntimeError("the output processor ended the stream")


@asynccontextmanager
async def _process(service: str, *arguments: str) -> "AsyncIterator[asyncio.subprocess.Process]":
    command = (sys.executable, "-m", f"tokenloom.services.{service}", *arguments)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _joined_engine(directory: Path, coordinator: str) -> AsyncIterator[None]:
    server = grpc.aio.server()
    add_EngineServicer_to_server(DeafEngine(), server)
    address = f"unix:{directory}/engine"
    server.add_insecure_port(address)
    await server.start()
    identity = EngineIdentity(
        engine_id="engine-0",
        epoch=1,
        address=address,
        num_kv_blocks=1 << 24,
        fingerprint=Fingerprint(block_size=16),
        limits=ModelLimits(max_model_len=1 << 17, vocab_size=_VOCABULARY),
    )
    async with open_channel(coordinator) as channel:
        call = CoordinatorStub(channel).Join(wait_for_ready=True)
        report = _report()
        report.hello.CopyFrom(make_hello("engine-0", 1))
        report.identity.CopyFrom(identity)
        await call.write(report)
        await call.read()
        reports = asyncio.create_task(_keep_reporting(call))
        try:
            yield
        finally:
            reports.cancel()
            call.cancel()
            await server.stop(None)


async def _keep_reporting(call: Any) -> None:
    step = 0
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        step += 1
        await call.write(_report(step=step))


def _report(step: int = 0) -> EngineReport:
    both, serving = EngineRole.ENGINE_ROLE_BOTH, EngineState.ENGINE_STATE_SERVING
    return EngineReport(role=both, state=serving, free_kv_blocks=1 << 24, step=step)


def _memory(pid: int, field: str) -> int:
    """Return a field of a process's memory, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}")


def main() -> int:
    """Measure what the arguments name. Returns 1 if the process took more memory than its container would have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--memory-limit", type=int, default=512 * _MIB, help="of the container, in bytes")
    asked = parser.parse_args()
    result = asyncio.run(measure(asked.prompts, asked.prompt_tokens, asked.memory_limit // 2))
    print(
        f"{asked.prompts} prompts of {asked.prompt_tokens} tokens, room for {asked.memory_limit // 2 / _MIB:.0f} MiB:"
    )
    print(f"  admitted {result.admitted}, refused {result.refusals}")
    print(
        f"  resident memory {result.idle_bytes / _MIB:.0f} MiB before, {result.peak_bytes / _MIB:.0f} MiB at its peak"
    )
    return int(result.peak_bytes > asked.memory_limit)


if __name__ == "__main__":
    raise SystemExit(main())
