"""A process that serves HTTP with 64 descriptors and no bound on connections until its input ends."""

import asyncio
import resource
import sys

import uvloop

from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.http.server.connections import Connections
from tokenloom.services.gateway.http.server.http_server import HttpServer

DESCRIPTORS = 64


async def app(exchange: HttpExchange) -> None:
    await exchange.respond(200, b"ok")


async def main() -> None:
    connections = Connections(10**6, 10**6)
    server = HttpServer(
        app,  # type: ignore[arg-type]
        "127.0.0.1:0",
        budget=AdmissionLimit(1),
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
