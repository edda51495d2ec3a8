"""Asks the parts of a running local mesh for their health."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenloom.supervisor.part_health import is_serving
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, read_part_state

from .mesh_sample import MeshPlacement, PartPlacement, merged, scrape

_NOT_SERVED: Mapping[str, str] = {"other_weights": "ASIDE", "unreached": "UNREACHED"}
"""The health of an engine that serves by its own word and gets no requests, by the fall-back that says so."""


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
    fall_backs: list[str] = field(default_factory=list)
    """What the part does without; of an engine also what the coordinator knows of it."""
    placement: PartPlacement | None = None
    """The rule of a coordinator, and what it compares of an engine; None if no gateway shows it."""


def find_rows(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    return asyncio.run(rows_of(mesh))


async def rows_of(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    rows = await asyncio.gather(*map(_row, mesh.parts))
    placements = await _placements(rows)
    known = [_with_known(row, rows) for row in rows]
    return [replace(row, placement=placements.of(row.service, row.index, row.model)) for row in known]


async def _placements(rows: Iterable[Row]) -> MeshPlacement:
    """Return how engines are compared, as the gateways that serve show it."""
    shown = [row.metrics for row in rows if row.service == "gateway" and row.health == "SERVING"]
    scrapes = await asyncio.gather(*(asyncio.to_thread(scrape, address) for address in shown))
    return merged(each.placements for each in scrapes)


def _with_known(row: Row, rows: Sequence[Row]) -> Row:
    """Return an engine's row with what coordinators know of it, which its own health does not show."""
    if row.service != "engine":
        return row
    about = f"{row.service}-{row.index}: "
    known = [each.removeprefix(about) for other in rows for each in other.fall_backs if each.startswith(about)]
    kinds = {each.partition(":")[0] for each in (*row.fall_backs, *known)}
    health = next((word for kind, word in _NOT_SERVED.items() if kind in kinds), row.health)
    own = {each.partition(":")[0] for each in row.fall_backs}
    added = [each for each in known if each.partition(":")[0] not in own]
    return replace(row, health=health if row.health == "SERVING" else row.health, fall_backs=[*row.fall_backs, *added])


async def _row(part: PartRecord) -> Row:
    state = read_part_state(Path(part.state_file))
    if state is None:
        return Row(part.service, part.index, part.role, None, None, None, "NOT_SERVING", part.model)
    fall_backs = list(map(str, state.fall_backs))
    health = "SERVING" if await is_serving(state.health) else "NOT_SERVING"
    role = state.role or part.role
    return Row(part.service, part.index, role, state.pid, state.address, state.metrics, health, part.model, fall_backs)
