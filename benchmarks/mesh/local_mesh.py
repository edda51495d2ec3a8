"""Runs a local mesh during a benchmark, and maps its processes to services."""

from collections import defaultdict
from collections.abc import Awaitable, Callable

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh, run_mesh_in_loop
from tokenloom.supervisor.output import LineCopier, Tail


class MeshBroke(Exception):
    """Raised when the mesh does not start or ends early; the message ends with its last lines."""


async def with_mesh(options: MeshOptions, work: Callable[[Mesh], Awaitable[None]]) -> None:
    """Run `work` while a mesh serves. Raises `KeyboardInterrupt` after a signal, and `MeshBroke` with the mesh's
    log."""
    logs = Tail()

    async def once_serving(mesh: Mesh) -> None:
        await mesh.wait_serving()
        await work(mesh)

    try:
        outcome = await run_mesh_in_loop(options, LineCopier(logs), once_serving)
    except Exception as error:
        raise MeshBroke(f"{error}\n{logs.text()}") from error
    if outcome.interrupted:
        raise KeyboardInterrupt


def http_url(mesh: Mesh) -> str:
    """Return the address of the first gateway."""
    return f"http://{mesh.gateways[0].http}"


def pids_by_service(mesh: Mesh) -> dict[str, list[int]]:
    """Return the processes of each service, in the order in which a request reaches them."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for part in mesh.parts:
        if part.state is not None:
            found[part.spec.service].append(part.state.pid)
    order = ("gateway", "tokenizer", "output_processor", "coordinator", "engine", "encoder")
    return {service: found[service] for service in order if service in found}
