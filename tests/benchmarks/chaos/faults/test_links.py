"""Parts behind proxies listen elsewhere, and are found where they were."""

import os
from pathlib import Path

from benchmarks.chaos.faults.links import Links
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
