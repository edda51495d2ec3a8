"""What goes wrong in a command ends it with one line and status 1."""

import contextlib
from collections.abc import Iterator

import typer

from tokenloom.supervisor.part import PartFailed
from tokenloom.supervisor.state_dir import StateDirError

from .chat_client import ChatFailed


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns the failures that a user can meet into a message."""
    try:
        yield
    except (PartFailed, StateDirError, ChatFailed) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
