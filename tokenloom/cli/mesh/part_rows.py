"""Asks the parts of a running local mesh for their health."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tokenloom.supervisor.part_health import is_serving
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, read_part_state


@dataclass(frozen=True)
class Row:
    """Describes one part, as ``--json`` prints it."""

    service: str
    index: int
    role: str | None
    pid: int | None
    address: str | None
    metrics: str | None
    health: str
    model: str
    """Empty for gateways, which serve all models of the mesh."""


def find_rows(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    return asyncio.run(rows_of(mesh))


async def rows_of(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    return list(await asyncio.gather(*map(_row, mesh.parts)))


async def _row(part: PartRecord) -> Row:
    state = read_part_state(Path(part.state_file))
    if state is None:
        return Row(part.service, part.index, part.role, None, None, None, "NOT_SERVING", part.model)
    health = "SERVING" if await is_serving(state.health) else "NOT_SERVING"
    role = state.role or part.role
    return Row(part.service, part.index, role, state.pid, state.address, state.metrics, health, part.model)
