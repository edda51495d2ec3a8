"""Finds the coordinator of a mesh, and what a command proves its name with to it."""

from pathlib import Path

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.supervisor.state_dir import read_part_state

from ..failures import CommandFailed
from .local_mesh import find_mesh


def coordinator_of(port: int | None) -> str:
    """Return the address of the coordinator of a local mesh. Raises ``CommandFailed`` if there is none."""
    for part in find_mesh(port).parts:
        if part.service == "coordinator" and (state := read_part_state(Path(part.state_file))) is not None:
            return state.address
    raise CommandFailed("the coordinator of the mesh does not listen yet; try again")


def tls_of(certs: Path | None, *names: str) -> MeshTLS | None:
    """Return the certificate of the first of ``names`` that a folder has; None: the mesh uses plain text.

    Raises ``CommandFailed`` if the folder has none of them, or a file that cannot be used.
    """
    if certs is None:
        return None
    name = next((name for name in names if (certs / f"{name}.crt").exists()), names[-1])
    try:
        return MeshTLS(CertificateFiles(certs / "ca.crt", certs / f"{name}.crt", certs / f"{name}.key", "certs"))
    except InvalidArgument as error:
        raise CommandFailed(error.message) from None
