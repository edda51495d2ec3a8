"""Finds what makes the product hard to learn one folder at a time: circles of folders, names borne by several classes,
code without reasons, and constructors of many parameters."""

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .imports import cycles, import_graph
from .source_tree import Source

MOST_PARAMETERS = 8
"""Parameters of a constructor, without ``self``; one with more takes records or is split."""


@dataclass(frozen=True)
class Rooms:
    """Holds the figures of the product alone, so that cutting benchmarks improves none of them."""

    files: int
    short_files: int
    """Files of under 40 lines, without ``__init__.py`` and ``__main__.py``."""
    circles: list[list[str]]
    """Groups of folders that depend on each other. A folder depends on another one if a file directly in it imports a
    file directly in the other; a folder and the folder in it are two."""
    shared_classes: dict[str, list[str]]
    """Names of public classes that several files define, with the files."""
    code_lines: int
    """Lines that hold code: neither empty, nor a comment alone, nor part of a docstring."""
    comment_lines: int
    """Lines that hold a comment alone."""
    statements: int
    wide_constructors: dict[str, int]
    """By class, the parameters of each ``__init__`` that has more than :data:`MOST_PARAMETERS`."""


def study_rooms(sources: Sequence[Source]) -> Rooms:
    """Read the product's modules."""
    trees = {source.path: ast.parse(source.text, source.path) for source in sources}
    comments = {source.path: _comment_lines(source) for source in sources}
    named = [source for source in sources if source.name not in ("__init__.py", "__main__.py")]
    return Rooms(
        files=len(sources),
        short_files=sum(source.lines < 40 for source in named),
        circles=sorted(cycles(folder_graph(sources)), key=len, reverse=True),
        shared_classes=_shared_classes(trees),
        code_lines=sum(_code_lines(source, trees[source.path]) for source in sources),
        comment_lines=sum(comments.values()),
        statements=sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree)),
        wide_constructors=dict(sorted(wide for path, tree in trees.items() for wide in _wide(path, tree))),
    )


def folder_graph(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return for each folder the folders that its own files import."""
    graph: dict[str, set[str]] = {source.folder: set() for source in sources}
    for importer, imported in import_graph(sources).items():
        folder = importer.rpartition("/")[0]
        graph[folder] |= {path.rpartition("/")[0] for path in imported} - {folder}
    return graph


def _shared_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    several = {name: paths for name, paths in places.items() if len(paths) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))


def _comment_lines(source: Source) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)


def _code_lines(source: Source, tree: ast.Module) -> int:
    prose = {line for text in _texts(tree) for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose for number, line in lines
    )


def _texts(tree: ast.Module) -> Iterator[ast.Expr]:
    """Yield the docstrings: those of modules, classes and functions, and those that follow an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def _wide(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                given = each.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                count += (given.vararg is not None) + (given.kwarg is not None)
                if count > MOST_PARAMETERS:
                    yield f"{path}:{node.name}", count
