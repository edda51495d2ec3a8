"""A command of typer with plain help, which answers flags of vLLM and others that it does not have."""

import contextlib
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WRITTEN = "tokenloom.written"
"""Where a context's ``meta`` holds the words of a command as the user wrote them."""
LISTS = "list_options"
"""Attribute of a command's function: the names of its options that are lists."""
_TOPIC = "tokenloom.help_topic"
"""Where the same holds the word of ``--help=TOPIC``."""
_HELP = "--help="

_CLICK_ERROR = typer.BadParameter.__mro__[2]
"""The class of errors with a message for the user, which typer does not export."""


class Command(TyperCommand):
    """Parses the arguments of a command whose users may know the flags of vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual; an unknown flag ends with one sentence that says what to use."""
        written = ctx.meta[WRITTEN] = list(args)
        try:
            return super().parse_args(ctx, self._without_topic(ctx, args))
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

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser of the arguments, which adds up the values of a list that is given more than once."""
        parser = super().make_parser(ctx)
        # Not typer's `multiple`, which splits a variable at spaces and a text from a file into its characters. The
        # option's own parser reads a list of texts as it reads one.
        names = getattr(self.callback, LISTS, ())
        for option in parser._long_opt.values():
            if option.dest in names:
                option.action = "append"
        return parser

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with every flag whole; of a command with many options, the topic that was asked for."""
        formatter.write(help_page(self, ctx))

    def _without_topic(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the arguments with ``--help`` for ``--help=TOPIC``, and note the topic for :meth:`format_help`."""
        before = args[: args.index("--")] if "--" in args else args
        at, topic = next(
            ((i, each[len(_HELP) :]) for i, each in enumerate(before) if each.startswith(_HELP)), (None, "")
        )
        if at is None:
            return args
        ctx.meta[_TOPIC] = topic
        return [*args[:at], "--help", *args[at + 1 :]]


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
    """Return the help of a command of typer; ``commands``: those of a group.

    A command with many options lists the most common ones and the names of the groups of the others. The topic of
    ``--help=TOPIC`` is a group, ``all``, or a part of an option's name. Raises ``typer.BadParameter`` for none of them.
    """
    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    usage = " ".join(command.collect_usage_pieces(context))
    head = f"Usage: {context.command_path} {usage}"
    sections = list(_groups(command.get_params(context), context))
    topic = context.meta.get(_TOPIC)
    if topic is not None and topic != _ALL:
        return "\n\n".join((head, *(_section(title, rows, width) for title, rows in _about(topic, sections)))) + "\n"
    blocks = [head, _paragraph(command.help or "", width)]
    shown, left = (sections, []) if topic == _ALL else _first(sections)
    blocks += [_section(title, rows, width) for title, rows in shown]
    if left:
        groups = [(_name_of(group), _flags_of(rows, width)) for group, rows in left]
        blocks.append(_section("Groups of further options", groups, width))
        way = f"--help=GROUP describes a group, --help=WORD those with it in their names, --help={_ALL} every option."
        blocks.append(_paragraph(way, width))
    for title, members in _by_panel(commands, "Commands"):
        blocks.append(_section(title, [(each.name, each.help or "") for each in members], width))
    blocks.append(_paragraph(command.epilog or "", width))
    return "\n\n".join(block for block in blocks if block) + "\n"


_Rows = list[tuple[str, str]]
_ALL = "all"
_FEW, _FIRST = 40, 24
"""Options of a command that are listed at once, and those of the first groups of a command that has more."""


def _first(sections: list[tuple[str, _Rows]]) -> tuple[list[tuple[str, _Rows]], list[tuple[str, _Rows]]]:
    """Divide the sections into those of the first page and the others."""
    counts = list(itertools.accumulate(len(rows) for _, rows in sections))
    if not counts or counts[-1] <= _FEW:
        return sections, []
    shown = sum(count <= _FIRST for count in counts)
    return sections[:shown], sections[shown:]


def _about(topic: str, sections: list[tuple[str, _Rows]]) -> list[tuple[str, _Rows]]:
    """Return the section of a group, or the options whose names hold the topic. Raises ``typer.BadParameter``."""
    wanted = _name_of(topic)
    if groups := [each for each in sections if _name_of(each[0]) == wanted]:
        return groups
    found = [(title, [row for row in rows if wanted and wanted in row[0]]) for title, rows in sections]
    if found := [(title, rows) for title, rows in found if rows]:
        return found
    names = ", ".join(_name_of(title) for title, _ in sections)
    raise typer.BadParameter(
        f"{topic!r} is no group of options and in no option's name; groups: {names}, {_ALL}", param_hint="--help"
    )


def _name_of(group: str) -> str:
    """``Structured output`` → ``structured-output``."""
    return group.lower().strip("-").replace(" ", "-").replace("_", "-")


def _flags_of(rows: _Rows, width: int) -> str:
    """Return the flags of a group in one line, as many of them as there is room for."""
    names = ", ".join(name.partition(" ")[0].partition("/")[0].rstrip(",") for name, _ in rows)
    return textwrap.shorten(names, width - _COLUMN, placeholder=" …", break_on_hyphens=False)


def _groups(params: Iterable[Any], context: Any) -> Iterator[tuple[str, _Rows]]:
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
