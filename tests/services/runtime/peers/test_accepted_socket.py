"""A handshake whose first bytes are there before the event loop turns to the connection, on both event loops."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tokenloom.services.runtime.peers.tls import take_socket
from tokenloom.supervisor.certificates import make_certificates


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and the client's."""
    folder: Path = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, days=30)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "gateway.crt", folder / "gateway.key")
    client = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    client.check_hostname = False
    return server, client


class Echo(asyncio.Protocol):
    """Takes the socket of a plain connection, and echoes what comes over TLS."""

    def __init__(self, context: ssl.SSLContext, tasks: list[asyncio.Task[Any]]) -> None:
        self._context = context
        self._tasks = tasks
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if transport.get_extra_info("ssl_object") is None:
            self._tasks.append(asyncio.create_task(self._encrypt(take_socket(transport))))

    async def _encrypt(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._context)
        transport.write(await reader.readexactly(5))
        transport.close()


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_no_byte_of_a_handshake_is_lost(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    answers: list[bytes] = []

    def talk() -> None:
        with (
            socket.create_connection(address, timeout=30) as plain,
            contexts[1].wrap_socket(plain) as encrypted,  # sends its ClientHello and waits
        ):
            encrypted.sendall(b"hello")
            answers.append(encrypted.recv(5))

    client = threading.Thread(target=talk)

    async def serve() -> None:
        tasks: list[asyncio.Task[Any]] = []
        # The ClientHello is in the socket's buffer before the loop accepts the connection.
        client.start()
        peeked, _ = await asyncio.to_thread(listener.accept)
        await asyncio.to_thread(peeked.recv, 1, socket.MSG_PEEK)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: Echo(contexts[0], tasks), peeked)
        await asyncio.to_thread(client.join)
        await asyncio.gather(*tasks)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        run: Coroutine[Any, Any, None] = serve()
        runner.run(run)
    listener.close()
    client.join()
    assert answers == [b"hello"]
