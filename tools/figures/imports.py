"""Finds import cycles, modules with a single importer and names borne by several files, from the source text alone."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from .source_tree import Source, module_name

_UNREMARKABLE = {"__init__.py", "__main__.py"}


@dataclass(frozen=True)
class Imports:
    """Holds what the report shows about imports. Modules are named by their paths."""

    cycles: list[list[str]]
    """Groups of modules that import each other, directly or through other members."""
    single_importer: list[str]
    """Modules, packages included, that exactly one other module imports."""
    shared_names: dict[str, list[str]]
    """File names borne by several files, with their folders; ``__init__.py`` and ``__main__.py`` are left out."""


def study(sources: Sequence[Source]) -> Imports:
    """Read the imports among the given modules. Every import statement counts: lazy and type-checking ones too."""
    graph = import_graph(sources)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for importer, imported in graph.items():
        for each in imported:
            importers[each].add(importer)
    return Imports(
        cycles=cycles(graph),
        single_importer=sorted(path for path, who in importers.items() if len(who) == 1),
        shared_names=_shared_names(sources),
    )


def import_graph(sources: Sequence[Source]) -> dict[str, set[str]]:
    """Return for each path the paths that it imports. ``from package import module`` counts as the module alone."""
    modules = {name: source.path for source in sources if (name := module_name(source.path))}
    graph: dict[str, set[str]] = {}
    for source in sources:
        found = {modules[name] for name in _imported(source, modules) if name in modules}
        graph[source.path] = found - {source.path}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected groups of more than one module, each sorted (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    numbers = count()

    def visit(node: str) -> None:
        order[node] = low[node] = next(numbers)
        stack.append(node)
        for following in sorted(graph[node]):
            if following not in order:
                visit(following)
            if following in stack:
                low[node] = min(low[node], low[following])
        if low[node] == order[node]:
            start = stack.index(node)
            groups.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted(group for group in groups if len(group) > 1)


def _imported(source: Source, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the import name of what each statement imports: the module where a name is one, otherwise its home."""
    for node in ast.walk(ast.parse(source.text, source.path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in modules else base


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = (module_name(source.path) or "").split(".")
    kept = len(parts) - node.level + (source.name == "__init__.py")
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def _shared_names(sources: Sequence[Source]) -> dict[str, list[str]]:
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        if source.name not in _UNREMARKABLE:
            folders[source.name].append(source.folder)
    several = {name: places for name, places in folders.items() if len(places) > 1}
    return dict(sorted(several.items(), key=lambda item: (-len(item[1]), item[0])))
