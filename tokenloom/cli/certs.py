"""``tokenloom certs`` makes the certificates of a mesh."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .failures import CommandFailed, reported


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the certificates and keys.")] = Path("certs"),
    days: Annotated[int, typer.Option(min=8, max=3650, help="Days that new certificates are valid.")] = 365,
    group_readable: Annotated[
        bool, typer.Option(help="Let the folder's group read the keys, for containers that run as another user.")
    ] = False,
    by_part: Annotated[
        bool,
        typer.Option(
            help="Make a folder for each part, which holds only what that part may see, and keep no ca.key: when a "
            "certificate is about to expire, all are made anew."
        ),
    ] = False,
    kubernetes: Annotated[
        Path | None, typer.Option(help="Also write Secrets for Kubernetes, one for each part, to this file.")
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of those Secrets.")] = "tokenloom",
) -> None:
    """Make a development CA and a certificate for every part of a mesh. Existing valid certificates are kept."""
    # Imported here: cryptography would slow the start of every other command.
    from tokenloom.supervisor.certificates import PARTS, make_certificates, make_separate_certificates, write_file

    if by_part and group_readable:
        raise typer.BadParameter("cannot be combined with --by-part", param_hint="--group-readable")
    with reported():
        try:
            if by_part:
                written = make_separate_certificates(folder, days=days)
            else:
                written = make_certificates(folder, days=days, group_readable=group_readable)
        except ValueError as error:
            raise CommandFailed(f"{error}: move it away, or name another folder") from None
        if kubernetes is not None:
            write_file(kubernetes, _secrets(folder, namespace, PARTS, by_part=by_part).encode(), 0o600)
    authority = "" if by_part else "; ca.key can sign for every part; do not copy it to the mesh"
    print(f"{len(written)} files written to {folder}{authority}.")
    if kubernetes is not None:
        print(f"Secrets for {len(PARTS)} parts written to {kubernetes}: kubectl apply -f {kubernetes}")


def _secrets(folder: Path, namespace: str, parts: Sequence[str], *, by_part: bool) -> str:
    """Return the Secrets as YAML, in cert-manager's layout; each document is JSON, which is valid YAML."""
    documents = []
    for part in parts:
        name = part.replace("_", "-")
        files = {"ca.crt": "ca.crt", "tls.crt": f"{name}.crt", "tls.key": f"{name}.key"}
        if by_part:
            files = {key: f"{name}/{key}" for key in files}
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": f"tokenloom-{name}-tls", "namespace": namespace},
            "type": "kubernetes.io/tls",
            "data": {key: base64.b64encode((folder / file).read_bytes()).decode() for key, file in files.items()},
        }
        documents.append(json.dumps(secret, indent=2))
    return "\n---\n".join(documents) + "\n"
