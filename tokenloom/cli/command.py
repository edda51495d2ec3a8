"""A command of typer with plain help, which answers flags of vLLM and others that it does not have."""

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WRITTEN = "tokenloom.written"
"""Where a context's ``meta`` holds the words of a command as the user wrote them."""

_CLICK_ERROR = typer.BadParameter.__mro__[2]
"""The class of errors with a message for the user, which typer does not export."""


class Command(TyperCommand):
    """Parses the arguments of a command whose users may know the flags of vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; an unknown flag ends with one sentence that says what to use."""
        written = ctx.meta[WRITTEN] = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # typer does not export the class
                _answer(error, written, [name for each in self.params for name in (*each.opts, *each.secondary_opts)])
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an expected failure ends it with one line."""
        from .failures import reported  # here, because the help does not need the supervisor's errors

        with reported():
            return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return with_default(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with every flag whole."""
        formatter.write(help_page(self, ctx))


class CommandGroup(TyperGroup):
    """Holds commands, and writes their help in the same way."""

    def get_help_option(self, ctx: Any) -> Any:
        return with_default(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with a line about each command."""
        formatter.write(help_page(self, ctx, (self.get_command(ctx, name) for name in self.list_commands(ctx))))


def with_default(help_option: Any) -> Any:
    """Return the option ``--help`` of typer with the value that it has if it is not given.

    Without one, typer converts None with pydantic, and its import takes a third of the time of ``tokenloom --help``.
    """
    if help_option is not None:
        help_option.default = False
    return help_option


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Print an error in the arguments as one line, and exit with its status."""
    try:
        yield
    except typer.Abort:
        typer.echo("Aborted.", err=True)
        sys.exit(1)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            error.show()  # type: ignore[attr-defined]
        elif isinstance(error, _CLICK_ERROR):
            text = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see `{context.command_path} --help`)"
            typer.echo(f"Error: {text}{hint}.", err=True)
        else:
            raise
        sys.exit(error.exit_code)  # type: ignore[attr-defined]


def _answer(error: Any, written: list[str], own: list[str]) -> None:
    """Replace the message of the error about a flag, which for ``-tp`` names its first letter only."""
    from tokenloom.services.runtime.host.foreign_flags import answer_unknown  # the table costs time

    name = str(error.option_name)
    whole = next((each for each in written if each.startswith(name)), name)
    error.message, error.possibilities = answer_unknown(whole, own), None


_NARROWEST, _WIDEST = 60, 100
_INDENT = "  "
_COLUMN = 26
"""Where descriptions begin; a longer flag has a line of its own."""


def help_page(command: Any, context: Any, commands: Iterable[Any] = ()) -> str:
    """Return the help of a command of typer; ``commands``: those of a group."""
    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    usage = " ".join(command.collect_usage_pieces(context))
    blocks = [f"Usage: {context.command_path} {usage}", _paragraph(command.help or "", width)]
    for title, rows in _groups(command.get_params(context), context):
        blocks.append(_section(title, rows, width))
    for title, members in _by_panel(commands, "Commands"):
        blocks.append(_section(title, [(each.name, each.help or "") for each in members], width))
    blocks.append(_paragraph(command.epilog or "", width))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _groups(params: Iterable[Any], context: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each group of arguments and options with what to write about each."""
    params = list(params)
    arguments = [each for each in params if each.param_type_name == "argument"]
    options = [each for each in params if each.param_type_name == "option"]
    for title, members in (*_by_panel(arguments, "Arguments"), *_by_panel(options, "Options")):
        rows = [each.get_help_record(context) for each in members]
        yield title, [(name.replace(" / ", "/"), text) for name, text in filter(None, rows)]


def _by_panel(members: Iterable[Any], default: str) -> Iterator[tuple[str, list[Any]]]:
    panels: dict[str, list[Any]] = {}
    for each in members:
        panels.setdefault(each.rich_help_panel or default, []).append(each)
    yield from panels.items()


def _section(title: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    rows = list(rows)
    column = min(_COLUMN, max((len(name) for name, _ in rows), default=0) + 2 * len(_INDENT))
    return "\n".join([f"{title}:", *(_row(name, text, column, width) for name, text in rows)])


def _row(name: str, text: str, column: int, width: int) -> str:
    lines = textwrap.wrap(" ".join(text.split()), width - column, break_long_words=False, break_on_hyphens=False)
    head = _INDENT + name
    if len(head) + len(_INDENT) <= column and lines:
        head = f"{head:<{column}}{lines.pop(0)}"
    return "\n".join([head, *(" " * column + line for line in lines)])


def _paragraph(text: str, width: int) -> str:
    return textwrap.fill(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
