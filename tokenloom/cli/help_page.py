"""Writes ``--help`` as plain text: options in groups, each flag whole, descriptions wrapped to the terminal."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

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
