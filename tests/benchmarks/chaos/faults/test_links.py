"""Parts behind proxies listen elsewhere, and are found where they were."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.chaos.faults.fault import Action
from benchmarks.chaos.faults.links import Links
from tokenloom.services.runtime.addresses import parse
from tokenloom.supervisor.layout import MeshOptions, parts_of
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import GatewayPorts


def flag(spec: PartSpec, name: str) -> str:
    """The last value of a flag."""
    return spec.command[len(spec.command) - spec.command[::-1].index(name)]


async def test_an_engine_behind_proxies(socket_dir: Path) -> None:
    options = MeshOptions(Path("model"), "m", prefill=1, decode=1)
    specs = {spec.name: spec for spec in parts_of(options, socket_dir, [GatewayPorts(1, 2)])}
    async with Links() as links:
        engine = await links.in_front_of(specs["engine-0"])
        tokenizer = await links.in_front_of(specs["tokenizer-0"])
        assert flag(engine, "--listen") == f"unix:{socket_dir}/engine-0-real.sock"
        assert flag(engine, "--advertise-address") == f"unix:{socket_dir}/engine-0.sock"
        assert flag(engine, "--kv-listen") == f"unix:{socket_dir}/engine-0-kv-real.sock"
        assert flag(engine, "--kv-advertise-address") == f"unix:{socket_dir}/engine-0-kv.sock"
        assert [path.name for path in engine.leftovers] == [
            "engine-0-real.sock",
            "engine-0-real.sock.calls",
            "engine-0-kv-real.sock",
        ]
        assert "--advertise-address" not in tokenizer.command
        fronts = set(os.listdir(socket_dir))
        assert fronts == {"engine-0.sock", "engine-0-kv.sock", "tokenizer-0.sock"}
        assert set(links.by_part) == {"engine-0", "tokenizer-0"}


async def test_parts_of_a_slow_network_listen_on_ports(socket_dir: Path) -> None:
    options = MeshOptions(Path("model"), "m", prefill=1, decode=1)
    specs = {spec.name: spec for spec in parts_of(options, socket_dir, [GatewayPorts(1, 2)])}
    async with Links(0.02) as links:
        engine = await links.in_front_of(specs["engine-0"])
        real = [parse(flag(engine, name)) for name in ("--listen", "--kv-listen")]
        assert all(address.is_local and address.port for address in real)
        assert len({address.port for address in real}) == 2
        assert flag(engine, "--kv-advertise-address") == f"unix:{socket_dir}/engine-0-kv.sock"
        async with echoing(real[0].host, real[0].port) as (_, ended):
            reader, writer = await asyncio.open_unix_connection(str(socket_dir / "engine-0.sock"))
            loop = asyncio.get_running_loop()
            link, began = links.by_part["engine-0"], loop.time()
            for _ in range(2):
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x"
                link.end()  # of a fault: the network stays slow
            assert loop.time() - began >= 0.08
            assert link.delayed_bytes() == 4
            writer.close()
            await ended.wait()


async def test_links_are_cut_and_reset_in_a_process_of_their_own(socket_dir: Path) -> None:
    async with asyncio.timeout(30), echoing("127.0.0.1", 0) as (port, ended):
        async with Links() as links:
            (shown,) = await links.in_front_of_gateway("gateway-0", [f"127.0.0.1:{port}"])
            assert links.pid not in (None, os.getpid())
            link = links.by_part["gateway-0"]
            reader, writer = await asyncio.open_connection("127.0.0.1", int(shown.rpartition(":")[2]))
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            assert link.begin(Action.CUT_TO) == 1
            writer.write(b"two")
            while not link.held_bytes():  # noqa: ASYNC110
                await asyncio.sleep(0)
            link.end()
            assert await reader.readexactly(3) == b"two"
            assert link.begin(Action.RESET) == 1
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            await ended.wait()
        assert links.pid is None
        with pytest.raises(RuntimeError, match="process of the proxies"):
            link.held_bytes()


@asynccontextmanager
async def echoing(host: str, port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """The port of a server, and what is set when its only connection has ended."""
    ended = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(10):
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(echo, host, port) as server:
        yield server.sockets[0].getsockname()[1], ended
