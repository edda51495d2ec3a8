"""A web application on asyncio with a model inside it: ``GET /?prompt=Once`` streams the continuation as text.

It uses nothing but the standard library, so that it shows the engine and not a framework. A client that goes away ends
its request, and a client that reads slowly holds nobody up: it gets what has come meanwhile in one piece.
"""

import argparse
import asyncio
from contextlib import aclosing
from urllib.parse import parse_qs, urlsplit

from tokenloom import AsyncLLM, EngineArgs, EngineDeadError, RequestOutputKind, SamplingParams
from tokenloom.model_files.model_path import DEMO_MODEL

_LONGEST_HEAD = 16 * 1024
_SECONDS_FOR_HEAD = 10


class WebApp:
    """Answers HTTP requests with the texts of one engine."""

    def __init__(self, engine: AsyncLLM, max_tokens: int = 64) -> None:
        self._engine = engine
        self._max_tokens = max_tokens

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection, and close it."""
        try:
            async with asyncio.timeout(_SECONDS_FOR_HEAD):
                head = await reader.readuntil(b"\r\n\r\n")
            prompt = _prompt(head)
            if prompt is None:
                writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nGET /?prompt=TEXT\n")
            else:
                await self._generate(prompt, reader, writer)
            await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # the client has gone, or never spoke HTTP
        finally:
            writer.close()

    async def _generate(self, prompt: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streaming = asyncio.create_task(self._stream(prompt, writer))
        gone = asyncio.create_task(reader.read())  # ends when the client closes its side
        done, _ = await asyncio.wait((streaming, gone), return_when=asyncio.FIRST_COMPLETED)
        if streaming not in done:
            streaming.cancel()  # which aborts the request in the engine
        gone.cancel()
        await asyncio.gather(streaming, gone, return_exceptions=True)

    async def _stream(self, prompt: str, writer: asyncio.StreamWriter) -> None:
        params = SamplingParams(temperature=0, max_tokens=self._max_tokens, output_kind=RequestOutputKind.DELTA)
        has_begun = False
        try:
            async with aclosing(self._engine.generate(prompt, params)) as outputs:
                async for output in outputs:
                    if not has_begun:
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n")
                        has_begun = True
                    writer.write(output.outputs[0].text.encode())
                    await writer.drain()
        except (ValueError, EngineDeadError) as error:
            if not has_begun:
                status = b"400 Bad Request" if isinstance(error, ValueError) else b"503 Service Unavailable"
                writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n" + f"{error}\n".encode())


def _prompt(head: bytes) -> str | None:
    """Return the prompt of a request; None if it has none."""
    method, _, rest = head.partition(b" ")
    target = rest.partition(b" ")[0].decode("latin-1")
    values = parse_qs(urlsplit(target).query).get("prompt")
    return values[0] if method == b"GET" and values else None


async def serve(engine: AsyncLLM, host: str, port: int) -> asyncio.Server:
    """Return a server that listens."""
    return await asyncio.start_server(WebApp(engine).answer, host, port, limit=_LONGEST_HEAD)


async def run(engine: AsyncLLM, host: str, port: int) -> None:
    async with engine:
        server = await serve(engine, host, port)
        print(f"http://{host}:{server.sockets[0].getsockname()[1]}/?prompt=Once")
        async with server:
            await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint directory or hub id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    # Before the event loop begins, because it takes seconds.
    engine = AsyncLLM(EngineArgs(args.model))
    try:
        asyncio.run(run(engine, args.host, args.port))
    except KeyboardInterrupt:
        engine.close()


if __name__ == "__main__":
    main()
