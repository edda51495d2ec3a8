"""The model that a command is given, as a directory or GGUF file on this machine."""

from pathlib import Path

import typer

from tokenloom.model_files import model_path
from tokenloom.preflight.model_place import check_place
from tokenloom.request.errors import TokenloomError, Unavailable

from .failures import CommandFailed, reported


def model_directory(
    model: str, served_name: str | None, hint: str = "MODEL", *, weights: bool = True
) -> tuple[Path, str]:
    """Return the checkpoint's path and the name it is served as; exits with a usage error if it is not found, and with
    a failure, which is no fault of the arguments, if the hub does not answer.

    Args:
        hint: What the error names: the argument or the option that holds the model.
        weights: Whether the files of weights are needed; a hub's other files are downloaded in any case.
    """
    if model not in model_path.PACKAGED:
        with reported():
            check_place(model, model_path.expanded(model))
    try:
        path = model_path.resolve(model, weights=weights)
    except Unavailable as error:
        raise CommandFailed(error.message) from None
    except TokenloomError as error:
        raise typer.BadParameter(error.message, param_hint=hint) from None
    return path, served_name or model_path.served_name(path, model)
