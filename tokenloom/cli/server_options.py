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
    """Return the server that the options name. Exits with a usage error for an invalid URL."""
    try:
        return Server(base_url or local_url() or DEFAULT_URL, api_key, timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--base-url") from None


def local_url() -> str | None:
    """Return the URL of the newest running mesh of this user; None if no mesh runs."""
    for mesh in running_meshes():
        for part in mesh.parts:
            state = read_part_state(Path(part.state_file)) if part.service == "gateway" else None
            if state is not None and state.http is not None:
                return f"http://{state.http}"
    return None
