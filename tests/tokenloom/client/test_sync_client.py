"""The client that blocks, in a thread beside a real gateway."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.client import Chunk, Client, errors


@pytest.fixture
def blocking(mesh: FakeMesh) -> Iterator[Client]:
    with Client(mesh.grpc_address, timeout=30) as client:
        yield client


async def test_models_and_answers(mesh: FakeMesh, blocking: Client) -> None:
    mesh.outputs.auto = ["Hi", " you"]
    assert (await asyncio.to_thread(blocking.models))[0].name == MODEL
    answer = await asyncio.to_thread(blocking.generate, "abc", max_tokens=6)
    assert (answer.text, answer.usage.completion_tokens) == ("Hi you", 6)
    answer = await asyncio.to_thread(blocking.chat, [{"role": "user", "content": "hi"}])
    assert answer.text == "Hi you"
    chunks = await asyncio.to_thread(lambda: list(blocking.stream_chat([{"role": "user", "content": "hi"}])))
    assert "".join(chunk.text for chunk in chunks) == "Hi you"
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("leaving", ["break", "close", "with"])
async def test_who_leaves_cancels_the_request(mesh: FakeMesh, blocking: Client, leaving: str) -> None:
    def listen() -> Chunk | None:
        if leaving == "break":
            for chunk in blocking.stream("abc"):
                return chunk
        elif leaving == "with":
            with blocking.stream("abc"):
                pass
        else:
            blocking.stream("abc").close()
        return None

    listening = asyncio.create_task(asyncio.to_thread(listen))
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", [1, 2])
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()
    await listening


async def test_errors_and_retries(mesh: FakeMesh, blocking: Client) -> None:
    asking = asyncio.create_task(asyncio.to_thread(blocking.generate, "abc"))
    (await mesh.outputs.next_request()).fail(errors.ResourceExhausted("full", retry_after=0.01))
    (await mesh.outputs.next_request()).answer("x")
    assert (await asking).text == "x"
    with pytest.raises(errors.InvalidArgument, match="top_p") as caught:
        await asyncio.to_thread(blocking.generate, "abc", top_p=2)
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    streaming = asyncio.create_task(asyncio.to_thread(lambda: list(blocking.stream("abc"))))
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", [1, 2])
    submitted.fail(errors.Internal())
    with pytest.raises(errors.Internal):
        await streaming


def test_a_wrong_address_is_named_at_once(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/none"
    started = time.monotonic()
    with (
        Client(address, timeout=30) as client,
        pytest.raises(errors.Unavailable, match=f"cannot connect to {address}: .*No such file or directory"),
    ):
        client.models()
    assert time.monotonic() - started < 5  # 15 s were spent on further attempts


def test_the_port_for_http_names_the_one_for_grpc() -> None:
    with (
        answering_http() as port,
        Client(f"127.0.0.1:{port}", timeout=30) as client,
        pytest.raises(errors.Unavailable, match=rf"does not speak gRPC; .*: try 127\.0\.0\.1:{port + 1000}\)"),
    ):
        client.generate("abc")


def test_a_proxy_is_not_used_on_this_machine_and_named_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering_http() as port:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        with (
            Client("127.0.0.1:1", timeout=30) as client,
            pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1: .*refused"),
        ):
            client.models()
        with (
            Client("192.0.2.1:9000", timeout=30) as client,
            pytest.raises(
                errors.Unavailable, match=rf"192\.0\.2\.1:9000: .*:{port}: HTTP proxy .* name the gateway in no_proxy"
            ),
        ):
            client.models()


@contextlib.contextmanager
def answering_http() -> Iterator[int]:
    """Answer each connection to a port of this machine with a refusal in HTTP/1.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_it_needs_no_torch() -> None:
    code = "import sys, tokenloom.client; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
