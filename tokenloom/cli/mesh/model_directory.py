"""The model that a command is given, as a directory on this machine."""

from pathlib import Path

import typer

from tokenloom import checkpoint
from tokenloom.request.errors import TokenloomError


def model_directory(model: str, served_name: str | None) -> tuple[Path, str]:
    """Return the checkpoint's directory and the name it is served as; exits with a usage error if it is not found."""
    try:
        path = checkpoint.resolve(model)
    except TokenloomError as error:
        raise typer.BadParameter(error.message, param_hint="MODEL") from None
    return path, served_name or checkpoint.served_name(path, model)
