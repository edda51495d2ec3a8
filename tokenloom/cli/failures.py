"""Ends a failed command with one line and an exit status that scripts can read."""

import contextlib
from collections.abc import Iterator

import typer

from tokenloom.preflight.refusal import Refused
from tokenloom.supervisor.part_failed import PartFailed
from tokenloom.supervisor.ports import PortTaken
from tokenloom.supervisor.state_dir import StateDirError

FAILED = 1
"""Exit status of a failed command."""
REFUSED = 2
"""Exit status for wrong arguments, also for a model or a port that cannot be served."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


class RequestFailed(Exception):
    """The server answered with an error, or its answer was incomplete."""


class CommandFailed(Exception):
    """Ends the command. The message says what was wrong and what would be right."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Print expected failures as one line and exit."""
    try:
        yield
    except (PartFailed, PortTaken, StateDirError, RequestFailed, CommandFailed) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(FAILED) from None
    except Refused as error:
        typer.secho(f"Error: {error}.", fg="red", err=True)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
