"""Writes the figures as Markdown tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .editor import Editor
from .hop_count import HopCount
from .hops import Share
from .imports import Imports
from .parameters import Parameter
from .rooms import MOST_PARAMETERS, Rooms
from .sizes import Sizes, Spread

_MOST_NAMES = 12
_MOST_FILES = 8


@dataclass(frozen=True)
class House:
    """Holds all figures of one checkout. A text in place of a figure says why it is not available."""

    sizes: Sizes
    parameters: list[Parameter]
    imports: Imports
    rooms: Rooms
    hops: HopCount | str
    editor: Editor | str


def write_report(house: House) -> str:
    """Return the report, one section for each kind of figure."""
    sections = (
        ("Sizes", _sizes(house.sizes)),
        ("Hops of a streamed chat request", _hops(house.hops)),
        ("Files that know a sampling parameter", _parameters(house.parameters)),
        ("Imports among our modules", _imports(house.imports)),
        ("Rooms", _rooms(house.rooms)),
        ("Imports that an editor cannot resolve", _editor(house.editor)),
    )
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in sections) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lay out a table: the first column to the left, the others to the right, so that it also reads as plain text."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    aligned = [
        [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (zip(row, widths, strict=True) for row in cells)
    ]
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    rule = "|".join("-" * (width + 1) + (":" if column else "-") for column, width in enumerate(widths))
    return [lines[0], f"|{rule}|", *lines[1:]]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _sizes(sizes: Sizes) -> list[str]:
    folders = [*sizes.folders, sizes.product, *sizes.aside]
    return [
        *_table(("folder", "files", "lines"), ((each.folder, each.files, each.lines) for each in folders)),
        "",
        *_table(("files directly in a folder", "files"), ((each.folder, each.files) for each in sizes.flat)),
        "",
        *_table(
            ("product, length in lines", "count", "median", "90th percentile", "longest", "which"),
            (_spread("file", sizes.files), _spread("function", sizes.functions)),
        ),
    ]


def _spread(name: str, spread: Spread) -> Sequence[object]:
    return name, spread.count, f"{spread.median:g}", spread.p90, spread.longest, spread.longest_name


def _hops(count: HopCount | str) -> list[str]:
    if isinstance(count, str):
        return [f"Not available: {count}"]
    hops, all_calls = count.hops, ", ".join(map(str, count.all_calls))
    rows = [(name, share) for name, share in hops.processes.items()]
    rows += [
        (f"**all {len(hops.processes)} processes**", hops.total),
        ("until the worker's execute_model", hops.until_execute),
        ("EngineCore.step to execute_model", hops.step),
    ]
    return [
        *_table(("process", "calls", "of them resumed", "functions", "files"), (_share(*row) for row in rows)),
        "",
        f"From the request's arrival to {hops.forward}; calls of product code only, Python {count.python}.",
        f"The request with the median number of calls, of {len(count.all_calls)} requests ({all_calls}).",
        "Calls that not three quarters of them have are left out: periodic work.",
    ]


def _share(name: str, share: Share) -> Sequence[object]:
    return name, share.calls, share.resumed, share.functions, share.files


def _parameters(parameters: Sequence[Parameter]) -> list[str]:
    rows = [
        (each.name, len(each.python) + len(each.contracts), len(each.python), len(each.contracts))
        for each in parameters
    ]
    return _table(("parameter", "files", "Python", "proto"), rows)


def _imports(imports: Imports) -> list[str]:
    names = [f"{name} x{len(folders)}" for name, folders in imports.shared_names.items()]
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    rows = (
        ("import cycles", len(imports.cycles)),
        ("modules with exactly one importer", len(imports.single_importer)),
        ("names borne by several files", len(names)),
    )
    return [
        *_table(("product and benchmarks", "count"), rows),
        "",
        *(f"Cycle: {', '.join(cycle)}" for cycle in imports.cycles),
        f"Shared names: {', '.join(names[:_MOST_NAMES])}{more}",
    ]


def _rooms(rooms: Rooms) -> list[str]:
    rows = (
        ("files", rooms.files),
        ("of them under 40 lines", rooms.short_files),
        ("circles of folders", len(rooms.circles)),
        ("folders in them", sum(map(len, rooms.circles))),
        ("names borne by several public classes", len(rooms.shared_classes)),
        (f"constructors of more than {MOST_PARAMETERS} parameters", len(rooms.wide_constructors)),
        ("statements", rooms.statements),
        ("lines of code", rooms.code_lines),
        ("lines of comment", rooms.comment_lines),
    )
    shared = [f"{name} x{len(files)}" for name, files in rooms.shared_classes.items()]
    return [
        *_table(("product", "count"), rows),
        "",
        *(f"Circle of {len(circle)} folders: {', '.join(circle)}" for circle in rooms.circles),
        f"Shared class names: {', '.join(shared)}",
        f"Wide constructors: {', '.join(f'{name} ({count})' for name, count in rooms.wide_constructors.items())}",
    ]


def _editor(editor: Editor | str) -> list[str]:
    if isinstance(editor, str):
        return [f"Not available: {editor}"]
    rows = (
        ("unresolved imports", editor.unresolved),
        ("of our own modules", editor.unresolved_ours),
        ("imported names that do not exist", editor.unknown_names),
        ("files with unresolved imports", len(editor.unresolved_files)),
        ("errors of every kind", editor.errors),
        ("files read", editor.files),
    )
    files = editor.unresolved_files
    more = " …" if len(files) > _MOST_FILES else ""
    listed = [f"In: {', '.join(files[:_MOST_FILES])}{more}"] if files else []
    return [*_table((f"pyright {editor.version}", "count"), rows), *([""] if listed else []), *listed]
