"""Tests the coordinator as a process."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.services.runtime.peers.channels import open_channel


async def start(folder: Path) -> asyncio.subprocess.Process:
    """Starts it and returns once it is SERVING."""
    flags = ["--listen", f"unix:{folder}/c", "--state-file", f"{folder}/c.json", "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tokenloom.services.coordinator", *flags)
    async with open_channel(f"unix:{folder}/c") as channel:
        request = health_pb2.HealthCheckRequest(service="tokenloom.v1.Coordinator")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
        async with asyncio.timeout(60):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
        watch.cancel()
    return process


async def test_serves_dies_and_serves_again(socket_dir: Path) -> None:
    process = await start(socket_dir)
    state = json.loads((socket_dir / "c.json").read_text())
    assert (state["service"], state["pid"]) == ("coordinator", process.pid)
    process.kill()
    await process.wait()

    process = await start(socket_dir)  # its socket and its state file are still there
    assert json.loads((socket_dir / "c.json").read_text())["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0
    assert not (socket_dir / "c.json").exists()
