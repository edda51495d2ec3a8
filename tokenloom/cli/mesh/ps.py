"""``tokenloom ps`` lists the parts of a running local mesh."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tokenloom.supervisor.state_dir import running_meshes

from ..failures import reported
from ..tables import print_tables

if TYPE_CHECKING:
    from .mesh_sample import Row


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of a table.")] = False,
    port: Annotated[int | None, typer.Option(help="The mesh on this HTTP port, not the newest one.")] = None,
) -> None:
    """List the parts of the newest running mesh of this user: service, index, role, pid, address, health, placement."""
    with reported():
        meshes = [mesh for mesh in running_meshes() if port is None or mesh.port == port]
    if not meshes:
        if as_json:
            print("[]")
        if not as_json or port is not None:
            where = "" if port is None else f" on port {port}"
            typer.echo(f"No mesh is running{where}; `tokenloom serve` starts one.", err=True)
        raise typer.Exit(0 if port is None else 1)
    from .mesh_sample import find_rows  # here, because it takes gRPC, which the help does not need

    rows = find_rows(meshes[0])
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_tables(_table(rows))
        for row in rows:
            for fall_back in row.fall_backs:
                typer.echo(f"fall-back of {row.service}-{row.index}: {fall_back}")


def _table(rows: "list[Row]") -> Table:
    """Return the rows; models are named if there are several."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    several = len({row.model for row in rows if row.model}) > 1
    places = any(row.placement for row in rows)
    models, placements = ("MODEL",) if several else (), ("PLACEMENT",) if places else ()
    for title in ("SERVICE", "INDEX", *models, "ROLE", "PID", "ADDRESS", "METRICS", "HEALTH", *placements):
        table.add_column(title, no_wrap=True, justify="right" if title in ("INDEX", "PID") else "left")
    for row in rows:
        colour = "green" if row.health == "SERVING" else "red"
        model = (row.model or "-",) if several else ()
        placed = (str(row.placement or "-"),) if places else ()
        cells = (row.role or "-", row.pid or "-", row.address or "-", row.metrics or "-")
        table.add_row(row.service, str(row.index), *model, *map(str, cells), Text(row.health, colour), *placed)
    return table
