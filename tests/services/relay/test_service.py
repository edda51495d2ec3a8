"""A relay as a service: health, metrics, sockets that it inherits, and what its settings refuse."""

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from tests.services.relay.running_relay import count, running_relay
from tests.tokenloom.client.fake_gateway import TEXT, FakeGateway, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.host.listener import server_options
from tokenloom.supervisor.part import is_serving
from tokenloom.supervisor.ports import hold_grpc
from tokenloom.v1 import inference_pb2 as pb
from tokenloom.v1 import inference_pb2_grpc

LIMIT = 30.0


async def ask(address: str) -> str:
    async with grpc.aio.insecure_channel(address, [("grpc.default_authority", "localhost")]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a"), wait_for_ready=True)
        return "".join([response.text async for response in call])


async def test_it_says_that_it_serves_and_counts_what_it_passes(socket_dir: Path) -> None:
    async with (
        asyncio.timeout(LIMIT),
        FakeGateway(FakeMesh(), socket_dir / "a", stops_at=4) as first,
        FakeGateway(FakeMesh(), socket_dir / "b") as second,
        running_relay(
            grpc_listen=f"unix:{socket_dir}/relay",
            grpc_gateways=(first.address, second.address),
            listen=f"unix:{socket_dir}/own",
        ) as host,
    ):
        assert await is_serving(host.health_address)
        asking = asyncio.create_task(ask(f"unix:{socket_dir}/relay"))
        await first.stopped.wait()
        assert (count(host, "calls_total"), count(host, "open_calls")) == (1, 1)
        await first.cut()
        with pytest.raises(grpc.aio.AioRpcError):  # the second gateway is of another mesh
            await asking
        assert (count(host, "continued_total"), count(host, "open_calls")) == (1, 0)
        assert await ask(f"unix:{socket_dir}/relay") == TEXT
        assert count(host, "call_request_bytes_total") == 2 * pb.GenerateRequest(text="a").ByteSize()
        assert count(host, "call_response_bytes_total") > len(TEXT)
        assert count(host, "lost_calls_total") == 0


async def test_a_call_that_ends_with_its_gateway_is_counted(socket_dir: Path) -> None:
    async with (
        asyncio.timeout(LIMIT),
        running_relay(
            grpc_listen=f"unix:{socket_dir}/relay",
            grpc_gateways=(f"unix:{socket_dir}/none",),
            listen=f"unix:{socket_dir}/own",
        ) as host,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="The connection to the gateway was lost"):
            await ask(f"unix:{socket_dir}/relay")
        assert count(host, "lost_calls_total") == 1


async def test_connections_wait_in_an_inherited_socket_until_it_serves(socket_dir: Path) -> None:
    with hold_grpc("127.0.0.1", 0) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        async with asyncio.timeout(LIMIT), FakeGateway(FakeMesh(), socket_dir / "a") as gateway:
            early = asyncio.create_task(ask(address))
            await asyncio.sleep(0)
            for _ in range(2):  # also the next process of the same socket
                async with running_relay(
                    grpc_listen=address,
                    grpc_listen_fd=socket.socket.dup(held).detach(),
                    grpc_gateways=(gateway.address,),
                    listen=f"unix:{socket_dir}/own",
                ):
                    assert await early == TEXT
                    assert await ask(address) == TEXT
                early = asyncio.create_task(ask(address))
                await asyncio.sleep(0)
            early.cancel()


async def test_other_machines_do_not_reach_it_in_plain_text(socket_dir: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"grpc_listen: other machines could reach 0\.0\.0\.0"):
        async with running_relay(grpc_listen="0.0.0.0:0", grpc_gateways=("a:1",), listen=f"unix:{socket_dir}/own"):
            pass


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"grpc_listen": "127.0.0.1:1"}, "--grpc-listen needs --grpc-gateways"),
        ({"https_listen": "127.0.0.1:1", "http_gateways": ("a:1",)}, "needs --public-tls-cert"),
        ({"http_gateways": ("unix:/a",), "https_listen": "127.0.0.1:1"}, "unix sockets are not held"),
        ({"grpc_listen": "127.0.0.1:1", "grpc_gateways": ("a",)}, "expected host:port"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RelaySettings.of(**values)


def test_clients_may_be_silent_as_long_as_at_a_gateway() -> None:
    settings = RelaySettings.of(grpc_listen="127.0.0.1:1", grpc_gateways=("a:1",))
    options = server_options(settings.client_limits, settings.max_message_bytes)
    assert options["grpc.http2.ping_timeout_ms"] > 10_000
    assert options["grpc.keepalive_timeout_ms"] > 10_000
