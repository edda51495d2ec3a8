"""Measures folders, files and functions."""

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .source_tree import Source, SourceTree


@dataclass(frozen=True)
class FolderSize:
    """Sums up the Python files of a folder and of the folders in it."""

    folder: str
    files: int
    lines: int


@dataclass(frozen=True)
class FlatFolder:
    """Counts the Python files that stand directly in a folder, its ``__init__.py`` included."""

    folder: str
    files: int


@dataclass(frozen=True)
class Spread:
    """Describes lengths in lines, and names the longest thing."""

    count: int
    median: float
    p90: int
    longest: int
    longest_name: str


@dataclass(frozen=True)
class Sizes:
    """Holds every size that the report shows."""

    product: FolderSize
    """All product folders together."""
    folders: list[FolderSize]
    """Every folder of the product, each followed by the folders in it."""
    aside: list[FolderSize]
    """Tests, benchmarks, examples and tools."""
    flat: list[FlatFolder]
    """The folders with the most files directly in them, largest first: product, tests and the others together."""
    files: Spread
    functions: Spread


def measure(tree: SourceTree, flat_folders: int = 8) -> Sizes:
    """Measure a checkout. ``flat_folders`` bounds the list of the largest flat folders."""
    aside = [_folder_size(folder, sources) for folder, sources in tree.aside.items()]
    everything = [*tree.product, *(source for sources in tree.aside.values() for source in sources)]
    flat = Counter(source.folder for source in everything).most_common(flat_folders)
    return Sizes(
        product=_folder_size("**all of the product**", tree.product),
        folders=_folders(tree.product),
        aside=aside,
        flat=[FlatFolder(folder, files) for folder, files in flat],
        files=_spread((source.lines, source.path) for source in tree.product),
        functions=_spread(length for source in tree.product for length in _function_lengths(source)),
    )


def _folders(sources: Sequence[Source]) -> list[FolderSize]:
    """Sum up every folder. A folder's files count in the folders above it as well."""
    by_folder: dict[str, list[Source]] = {}
    for source in sources:
        parts = source.folder.split("/")
        for depth in range(1, len(parts) + 1):
            by_folder.setdefault("/".join(parts[:depth]), []).append(source)
    return [_folder_size(folder, members) for folder, members in sorted(by_folder.items())]


def _folder_size(folder: str, sources: Sequence[Source]) -> FolderSize:
    return FolderSize(folder, len(sources), sum(source.lines for source in sources))


def _function_lengths(source: Source) -> Iterable[tuple[int, str]]:
    """Yield each function's lines, from ``def`` to its last line, without decorators; nested functions count too."""
    for node in ast.walk(ast.parse(source.text, source.path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{source.path}:{node.name}"


def _spread(lengths: Iterable[tuple[int, str]]) -> Spread:
    ordered = sorted(lengths)
    if not ordered:
        return Spread(0, 0.0, 0, 0, "")
    longest, name = ordered[-1]
    return Spread(
        count=len(ordered),
        median=median(length for length, _ in ordered),
        p90=ordered[len(ordered) * 9 // 10][0],
        longest=longest,
        longest_name=name,
    )
