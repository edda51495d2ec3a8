"""``tokenloom ps`` lists the parts of a running local mesh."""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tokenloom.supervisor.part_health import is_serving
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, read_part_state, running_meshes

from ..failures import reported
from ..tables import print_tables


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


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of a table.")] = False,
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
) -> None:
    """List the parts of the newest running mesh of this user: service, index, role, pid, address, health."""
    with reported():
        meshes = [mesh for mesh in running_meshes() if port is None or mesh.port == port]
    if not meshes:
        if as_json:
            print("[]")
        else:
            where = "" if port is None else f" on port {port}"
            typer.echo(f"No mesh is running{where}; `tokenloom serve` starts one.", err=True)
        raise typer.Exit(0 if port is None else 1)
    rows = asyncio.run(rows_of(meshes[0]))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_tables(_table(rows))


async def rows_of(mesh: MeshRecord) -> list[Row]:
    """Ask all parts for their health concurrently."""
    return list(await asyncio.gather(*map(_row, mesh.parts)))


async def _row(part: PartRecord) -> Row:
    state = read_part_state(Path(part.state_file))
    if state is None:
        return Row(part.service, part.index, part.role, None, None, None, "NOT_SERVING")
    health = "SERVING" if await is_serving(state.health) else "NOT_SERVING"
    return Row(part.service, part.index, state.role or part.role, state.pid, state.address, state.metrics, health)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("SERVICE", "INDEX", "ROLE", "PID", "ADDRESS", "METRICS", "HEALTH"):
        table.add_column(title, no_wrap=True, justify="right" if title in ("INDEX", "PID") else "left")
    for row in rows:
        colour = "green" if row.health == "SERVING" else "red"
        cells = (row.service, row.index, row.role or "-", row.pid or "-", row.address or "-", row.metrics or "-")
        table.add_row(*map(str, cells), f"[{colour}]{row.health}[/]")
    return table
