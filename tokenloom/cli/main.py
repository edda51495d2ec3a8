"""The command ``tokenloom`` with its subcommands."""

import os
import signal
import sys
from typing import Annotated

from tokenloom import __version__
from tokenloom.process.uncollected_imports import uncollected_imports

# Collected as usual, an import walks what modules define again and again, though it stays: about a tenth of the CPU
# time of every start.
with uncollected_imports():
    import typer

    from . import streams
    from .commands import PluggedCommands, lazy_group

_GROUPS = {
    "Serve": ("serve.serve", "serve.run", "mesh.demo", "mesh.local_mesh:stop", "serve.serve:relay", "fetch"),
    "Ask a server": ("chat.chat", "chat.chat:complete", "chat.chat:transcribe", "batch.run_batch", "models"),
    "Run without a server": ("batch.generate", "replay"),
    "Manage a mesh": (
        "mesh.local_mesh:ps",
        "mesh.local_mesh:top",
        "mesh.plan",
        "mesh.plan:scale",
        "mesh.plan:move",
        "mesh.kv_events",
        "serve.config",
        "doctor",
        "certs",
    ),
    "Measure": ("bench.chaos", "bench.bench"),
    "Install": ("install:build_kernels", "install:completion"),
}

_named: list[str] = []
"""The packages of ``tokenloom --plugins``."""


def _plugged_commands() -> dict[str, str]:
    """Return the places of the commands of the packages that flag or variable name. Raises ``ValueError``."""
    from_variable = [] if _named else os.environ.get("TOKENLOOM_PLUGINS", "").split(",")
    if not (names := [name.strip() for name in (*_named, *from_variable) if name.strip()]):
        return {}
    from tokenloom.process.plugins import check_plugins, commands_of, used_by

    # The variable names the packages of parts of a mesh too, which bring no commands.
    return commands_of(check_plugins(_named or used_by(names, "cli"), "cli"))


def _name_plugins(value: str) -> None:
    """Note the packages whose commands are offered. Raises ``ValueError`` for one that brings none."""
    from tokenloom.process.plugins import check_plugins

    _named[:] = check_plugins([name.strip() for name in value.split(",")], "cli")


COMPLETION_VARIABLE = "_TOKENLOOM_COMPLETE"
"""Set by the scripts of ``tokenloom completion`` when a shell asks; only then typer prepares the answers."""

app = typer.Typer(
    cls=lazy_group(__package__, _GROUPS, PluggedCommands(_name_plugins, _plugged_commands)),
    help="Serve large language models as a mesh of small gRPC services.",
    epilog="--plugins LIST before a command: installed packages whose commands to offer, separated by commas. "
    "Exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted.",
    no_args_is_help=True,
    # rich heeds the variable by itself; typer writes its colours to every terminal.
    context_settings={"color": False if os.environ.get("NO_COLOR") else None},
    add_completion=COMPLETION_VARIABLE in os.environ,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenloom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle options that stand before a command."""


def main() -> None:
    """Run the console script."""
    streams.prepare()
    status: str | int | None = 0
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        app()
    except KeyboardInterrupt:  # while the command's modules are imported; later the command ends as it is interrupted
        status = 130
    except SystemExit as end:
        status = end.code
    except OSError as error:  # before the command began, or while it wrote its own error
        streams.report(f"Error: {error}")
        status = 1
    sys.exit(status if streams.flush_all() else status or 1)


if __name__ == "__main__":
    main()
