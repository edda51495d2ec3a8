"""Finds the modules that some modules of a package import, from the source text alone."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def modules_of(root: Path, package: str, names: Iterable[str]) -> dict[str, Path]:
    """Return these modules and packages of ``package``, and all that they need, each with its file under ``root``.

    Imports within functions count. Those for type checkers only do not.
    """
    found: dict[str, Path] = {}
    left = list(names)
    while left:
        name = left.pop()
        path = _file(root, name)
        if path is None or name in found:
            continue
        found[name] = path
        left += [
            name.rpartition(".")[0],
            *(each for each in _imported(name, path) if each.partition(".")[0] == package),
        ]
    return found


def _file(root: Path, name: str) -> Path | None:
    """Return the file of a module; None: the name is no module, but something within one."""
    path = root.joinpath(*name.split("."))
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next((file for file in files if name and file.is_file()), None)


def _imported(name: str, path: Path) -> Iterator[str]:
    """Yield the full names that a module imports, and what it takes from them, which may be modules too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _run(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those within it that are run."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and child in node.body
        if not is_for_types:
            yield from _run(child)
