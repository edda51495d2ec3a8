"""A process that serves HTTP with 64 descriptors and no bound on connections until its input ends."""

import asyncio
import resource
import sys
from typing import Any

import uvloop

from tokenloom.services.gateway.http.byte_budget import ByteBudget
from tokenloom.services.gateway.http.server.connections import Connections
from tokenloom.services.gateway.http.server.http_server import HttpServer

DESCRIPTORS = 64


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def main() -> None:
    connections = Connections(10**6, 10**6)
    server = HttpServer(
        app,  # type: ignore[arg-type]
        "127.0.0.1:0",
        budget=ByteBudget(1),
        connections=connections,
        insecure=False,
    )
    serving = asyncio.create_task(server.serve())
    print(server.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    await serving


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    uvloop.run(main())
