"""Ends a failed command with one line and an exit status that scripts can read."""

import contextlib
import os
from collections.abc import Iterator

import typer

from tokenloom.preflight.small_files import CannotServe
from tokenloom.request.errors import TokenloomError
from tokenloom.supervisor.part_spec import PartFailed
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
        print_error(str(error))
        raise typer.Exit(FAILED) from None
    except TokenloomError as error:  # such as a model that is not found
        print_error(error.message)
        raise typer.Exit(FAILED) from None
    except CannotServe as error:
        print_error(f"{error}.")
        raise typer.Exit(REFUSED) from None
    except BrokenPipeError:  # the reader of the output went away, as after `| head`; typer ends the command
        raise
    except OSError as error:  # a full disk, a folder without access, a limit of this process
        print_error(reason_of(error))
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def print_error(text: str) -> None:
    """Write an error as one line, whatever the names in it hold."""
    text = " ".join(text.splitlines())
    with contextlib.suppress(OSError):  # the exit status says it too
        typer.secho(f"Error: {text}", fg="red", err=True)


def reason_of(error: OSError) -> str:
    """Return ``/a/file: No space left on device``, without the file if the error names none."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, (str, bytes)) else reason
