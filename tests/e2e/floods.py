"""Floods a gateway with connections and gRPC streams while streams run; they must continue with the same tokens.

``python -m tests.e2e.floods [--connections N] [--streams N] [--descriptors N]`` floods a mesh of its own and prints
what it saw; by default with 60,000 gRPC streams and more connections than the gateway has descriptors.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import psutil

from tests.e2e.conftest import Served, serving
from tests.mesh.harness import VOCAB_SIZE
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.v1 import inference_pb2_grpc

HOOK = Path(__file__).parent / "part_hook"
STEP_SECONDS = 0.02
CANARIES = 4
CANARY_TOKENS = 32
PROMPT = list(range(100, 120))
STREAMS_PER_CHANNEL = 2000
_HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nX-Slow: "


@dataclass
class Seen:
    """What a flood did."""

    streams: Counter[str] = field(default_factory=Counter)
    """Ends of gRPC streams by status; ``OPEN``: it was open until the end."""
    num_refused: int = 0
    """Connections that the gateway closed or did not accept."""
    canaries: list[list[int]] = field(default_factory=list)
    largest_gap: float = 0.0
    """Seconds between two chunks of a canary."""
    num_descriptors: int = 0
    """Open descriptors of the gateway, at most."""
    rss_bytes: int = 0
    """Memory of the gateway, at most."""

    @property
    def canaries_are_right(self) -> bool:
        expected = expected_tokens(PROMPT, CANARY_TOKENS, VOCAB_SIZE)
        return bool(self.canaries) and all(each == expected for each in self.canaries)


def start(serve: Any, descriptors: int, *arguments: str) -> Served:
    """Start a mesh whose parts may open so many descriptors each."""
    path = os.pathsep.join((str(HOOK), *filter(None, (os.environ.get("PYTHONPATH"),))))
    served: Served = serve(
        "--worker",
        "hash",
        *arguments,
        TOKENLOOM_HASH_STEP_SECONDS=str(STEP_SECONDS),
        TEST_DESCRIPTORS=str(descriptors),
        PYTHONPATH=path,
    )
    return served


async def flood(served: Served, *, connections: int, streams: int) -> Seen:
    """Open everything while canaries run, one after the other on connections that they keep."""
    seen = Seen()
    grpc_address = next(part["address"] for part in await asyncio.to_thread(served.ps) if part["service"] == "gateway")
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client, asyncio.TaskGroup() as group:
        started = [asyncio.Event() for _ in range(CANARIES)]
        for each in started:
            group.create_task(_run_canaries(client, seen, each, stop))
        watching = group.create_task(_watch(served, seen))
        for each in started:
            await each.wait()
        async with contextlib.AsyncExitStack() as held:
            calls = await _open_streams(held, grpc_address, streams)
            await _connect(held, served.url, grpc_address, connections, seen)
            done = len(seen.canaries)
            while len(seen.canaries) < done + 2 * CANARIES:  # noqa: ASYNC110 - they run in the flood
                await asyncio.sleep(0.1)
            for call in calls:
                seen.streams[(await call.code()).name if call.done() else "OPEN"] += 1
        stop.set()
        watching.cancel()
    return seen


async def _run_canaries(client: httpx.AsyncClient, seen: Seen, started: asyncio.Event, stop: asyncio.Event) -> None:
    body = {
        "model": "tokenloom-demo",
        "prompt": PROMPT,
        "max_tokens": CANARY_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    while not stop.is_set():
        tokens: list[int] = []
        last = 0.0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last:
                    seen.largest_gap = max(seen.largest_gap, now - last)
                last = now
                started.set()
                tokens += httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"][0]["token_ids"]
        seen.canaries.append(tokens)


async def _connect(held: contextlib.AsyncExitStack, url: str, grpc_address: str, connections: int, seen: Seen) -> None:
    """Open connections to both edges: a third says nothing, a third begins a head, a third says nothing over gRPC."""
    http, rpc = httpx.URL(url), grpc_address.rpartition(":")
    for number in range(connections):
        to_grpc = number % 3 == 2
        address = (rpc[0], int(rpc[2])) if to_grpc else (http.host, http.port or 80)
        try:
            opened = socket.create_connection(address, timeout=5)
        except OSError:
            seen.num_refused += 1
            continue
        held.callback(opened.close)
        opened.setblocking(False)
        if number % 3 == 1:
            with contextlib.suppress(OSError):
                opened.send(_HALF_A_HEAD)
        if number % 50 == 0:
            await asyncio.sleep(0)


async def _open_streams(held: contextlib.AsyncExitStack, address: str, streams: int) -> list[Any]:
    """Open sessions that ask for nothing."""
    calls = []
    for first in range(0, streams, STREAMS_PER_CHANNEL):
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = await held.enter_async_context(grpc.aio.insecure_channel(address, options=options))
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(min(STREAMS_PER_CHANNEL, streams - first)):
            calls.append(stub.GenerateSession())
            await asyncio.sleep(0)
    return calls


async def _watch(served: Served, seen: Seen) -> None:
    process = served.part("gateway")
    while True:
        with contextlib.suppress(psutil.Error):
            seen.num_descriptors = max(seen.num_descriptors, process.num_fds())
            seen.rss_bytes = max(seen.rss_bytes, process.memory_info().rss)
        await asyncio.sleep(0.2)


def main() -> None:
    """Flood a mesh and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=4500)
    parser.add_argument("--streams", type=int, default=60_000)
    parser.add_argument("--descriptors", type=int, default=4096)
    options = parser.parse_args()
    with serving() as serve:
        served = start(serve, options.descriptors)
        before = {process.pid for process in served.family()}
        seen = asyncio.run(flood(served, connections=options.connections, streams=options.streams))
        assert before <= {process.pid for process in served.family()}, "a process died"
        print(f"{len(seen.canaries)} canaries, tokens are {'right' if seen.canaries_are_right else 'WRONG'}")
        print(
            f"largest gap {seen.largest_gap:.2f} s; descriptors {seen.num_descriptors}; RSS {seen.rss_bytes >> 20} MiB"
        )
        print(f"connections refused: {seen.num_refused}; ends of streams: {dict(seen.streams)}")


if __name__ == "__main__":
    main()
