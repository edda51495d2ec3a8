"""What goes wrong in a command ends it with one line and a status that scripts can read."""

import contextlib
from collections.abc import Iterator

import typer

from tokenloom.supervisor.part import PartFailed
from tokenloom.supervisor.state_dir import StateDirError

from .server import RequestFailed

FAILED = 1
"""Exit status when something could not be done; 2 is for arguments that are wrong."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class CommandFailed(Exception):
    """Ends the command; the message says what was wrong and what would be right."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turns the failures that a user can meet into a message."""
    try:
        yield
    except (PartFailed, StateDirError, RequestFailed, CommandFailed) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
