"""Parts behind proxies listen elsewhere, and are found where they were."""

import asyncio
import os
from pathlib import Path

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
        server = await asyncio.start_server(echo, real[0].host, real[0].port)
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
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(10):
        writer.write(data)
    writer.close()
