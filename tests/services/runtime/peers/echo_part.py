"""A process that serves an echo over gRPC at an address until it is killed. It prints its address, and ``ended`` for
each call that ends. After the message ``busy SECONDS`` its event loop is busy for so long."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tokenloom.services.runtime.host.listener import SERVER_OPTIONS

METHOD = "/test.Test/Stream"


async def echo(requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
    try:
        async for request in requests:
            if request.startswith(b"busy "):
                end = time.monotonic() + float(request.removeprefix(b"busy "))
                while time.monotonic() < end:
                    pass
            await context.write(request)
    finally:
        print("ended", flush=True)


class Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.stream_stream_rpc_method_handler(echo)


async def main(address: str) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port(address)
    await server.start()
    print(address if address.startswith("unix:") else f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
