"""Options that select a server, and the connection to it."""

from pathlib import Path
from typing import Annotated

import typer

from tokenloom.supervisor.state_dir import read_part_state, running_meshes

from .options import warn_if_exposed
from .server import Server

DEFAULT_URL = "http://127.0.0.1:8000"

BaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_BASE_URL",
        show_envvar=True,
        help=f"Server with OpenAI's API; by default the newest local mesh, or {DEFAULT_URL} if none runs.",
    ),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar=["TOKENLOOM_API_KEY", "OPENAI_API_KEY"], show_envvar=True, help="Key to send.", callback=warn_if_exposed
    ),
]
ServedModel = Annotated[
    str | None, typer.Option("--model", help="Name of a served model; by default the first that the server lists.")
]


def connect(base_url: str | None, api_key: str = "", timeout: float = 120.0) -> Server:
    """Return the server that the options name. Exits with a usage error for an invalid URL or key."""
    url, certificate = (base_url, None) if base_url else local_url() or (DEFAULT_URL, None)
    try:
        return Server(url, api_key, timeout, certificate)
    except ValueError as error:
        hint = "--api-key" if "key" in str(error) else "--base-url"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def local_url() -> tuple[str, Path | None] | None:
    """Return the URL of the newest running mesh of this user, and its certificate if it has one; None: no mesh runs."""
    for mesh in running_meshes():
        for part in mesh.parts:
            state = read_part_state(Path(part.state_file)) if part.service == "gateway" else None
            if state is not None and state.http is not None:
                # By the mesh's own state file: a local mesh with a certificate was once asked in plain text.
                secured = state.certificate is not None
                return f"{'https' if secured else 'http'}://{state.http}", state.certificate
    return None
