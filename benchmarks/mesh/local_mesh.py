"""A local mesh for the length of a benchmark, and which of its processes are whose."""

from collections import defaultdict
from collections.abc import Awaitable, Callable

from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier, Tail
from tokenloom.supervisor.run import run_mesh


class MeshBroke(Exception):
    """The mesh did not come up or did not last; the message ends with its last lines."""


async def with_mesh(options: MeshOptions, work: Callable[[Mesh], Awaitable[None]]) -> None:
    """Runs `work` beside a serving mesh. Raises `KeyboardInterrupt` after a signal, `MeshBroke` with the mesh's log."""
    logs = Tail()

    async def once_serving(mesh: Mesh) -> None:
        await mesh.wait_serving()
        await work(mesh)

    try:
        outcome = await run_mesh(options, LineCopier(logs), once_serving)
    except Exception as error:
        raise MeshBroke(f"{error}\n{logs.text()}") from error
    if outcome.interrupted:
        raise KeyboardInterrupt


def http_url(mesh: Mesh) -> str:
    """Of the first gateway."""
    return f"http://{mesh.gateways[0].http}"


def pids_by_service(mesh: Mesh) -> dict[str, list[int]]:
    """The processes of each service, in the order in which a request meets them."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for part in mesh.parts:
        if part.state is not None:
            found[part.spec.service].append(part.state.pid)
    order = ("gateway", "tokenizer", "output_processor", "coordinator", "engine")
    return {service: found[service] for service in order if service in found}
