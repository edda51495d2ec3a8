"""The programs and helpers of the tests call what exists, with arguments that it takes.

A campaign of an hour is run seldom, and Python finds a function that got another parameter only when it is called:
``tests.soak.endurance`` ended with a TypeError before its mesh started, two days after the change.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "examples", "tests", "tools")
ROOTS = (*FOLDERS, "tokenloom")
"""Of modules that are in this repository."""
CALLERS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.startswith("test_")  # these are run
]
_KEEP_ARGUMENTS = {"contextmanager", "asynccontextmanager", "cache"}
"""Decorators of functions that are called with the function's own arguments."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_path(name: str) -> Path | None:
    """Return the file of a module of this repository; None: it is another one's, or a folder."""
    path = ROOT.joinpath(*name.split("."))
    if name.partition(".")[0] not in ROOTS:
        return None
    return next(
        (each for each in (path.with_suffix(".pyi"), path.with_suffix(".py"), path / "__init__.py") if each.is_file()),
        None,
    )


@cache
def imports_of(path: Path) -> dict[str, tuple[str, str]]:
    """Return what a file imports from modules: by its name there, the module and the name in it."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                folder = path.parents[node.level - 1].relative_to(ROOT)
                module = ".".join((*folder.parts, *module.split("."))).strip(".")
            found |= {each.asname or each.name: (module, each.name) for each in node.names}
    return found


@cache
def bound_in(path: Path) -> frozenset[str]:
    """Return the names that may be something else in parts of a file: variables, parameters and inner functions."""
    nodes = list(ast.walk(tree(path)))
    outer = {each for node in nodes if isinstance(node, ast.Module | ast.ClassDef) for each in node.body}
    inner = {node.name for node in nodes if isinstance(node, Definition) and node not in outer}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return frozenset(stored | inner | {node.arg for node in nodes if isinstance(node, ast.arg)})


@cache
def defined_in(path: Path) -> dict[str, Definition]:
    return {node.name: node for node in tree(path).body if isinstance(node, Definition)}


def exists(module: str, name: str) -> bool:
    if name == "*" or module.partition(".")[0] not in ROOTS:
        return True
    if (path := module_path(module)) is None:
        return module_path(f"{module}.{name}") is not None or ROOT.joinpath(*module.split("."), name).is_dir()
    known = {*defined_in(path), *imports_of(path), *bound_in(path)}
    return name in known or "__getattr__" in known or module_path(f"{module}.{name}") is not None


def definition(path: Path, name: str) -> Definition | None:
    """Return the function or class that ``name`` is in a file; None: it may be something else."""
    if name in bound_in(path):
        return None
    if found := defined_in(path).get(name):
        return found
    module, name = imports_of(path).get(name, ("", ""))
    source = module_path(module) if module else None
    return definition(source, name) if source is not None else None


def called(path: Path, function: ast.expr) -> Definition | None:
    """Return what a call calls, by a name or as a part of a module; None: it may be something else."""
    if isinstance(function, ast.Name):
        return definition(path, function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = function.value.id
        source = None if name in bound_in(path) else module_path(".".join(imports_of(path).get(name, ("", ""))))
        return definition(source, function.attr) if source is not None else None
    return None


def parameters(found: Definition) -> ast.arguments | None:
    """Return what a call of it takes; None: that is not to be seen in its definition."""
    decorators = {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in found.decorator_list}
    if isinstance(found, Function):
        return found.args if decorators <= _KEEP_ARGUMENTS else None
    init = next((each for each in found.body if isinstance(each, Function) and each.name == "__init__"), None)
    if init is None:
        return fields(found) if decorators == {"dataclass"} and not found.bases else None
    if init.decorator_list or decorators or found.keywords:
        return None
    own = "posonlyargs" if init.args.posonlyargs else "args"
    parts = dict(ast.iter_fields(init.args))
    return ast.arguments(**{**parts, own: parts[own][1:]})


def fields(found: ast.ClassDef) -> ast.arguments | None:
    """Return what makes a dataclass; None: some of its fields are made in another way."""
    options = "".join(map(ast.unparse, found.decorator_list))
    statements = [each for each in found.body if isinstance(each, ast.AnnAssign)]
    if any(
        word in ast.unparse(each) for each in statements for word in ("init=False", "ClassVar", "KW_ONLY", "InitVar")
    ):
        return None
    names = [ast.arg(ast.unparse(each.target)) for each in statements]
    values = [each.value for each in statements]
    if "kw_only=True" in options:
        return ast.arguments([], [], None, names, values, None, [])
    return ast.arguments([], names, None, [], [], None, [each for each in values if each is not None])


def misfit(call: ast.Call, taken: ast.arguments) -> str:
    """Return why the call's arguments do not fit; empty: they do."""
    given = {each.arg for each in call.keywords if each.arg is not None}
    positional = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    named = {*positional[len(taken.posonlyargs) :], *(each.arg for each in taken.kwonlyargs)}
    if not taken.kwarg and (unknown := given - named):
        return f"takes no {', '.join(sorted(unknown))}"
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return ""
    if not taken.vararg and len(call.args) > len(positional):
        return f"takes {len(positional)} arguments by position, not {len(call.args)}"
    if twice := given & {*positional[: len(call.args)]} - {each.arg for each in taken.posonlyargs}:
        return f"gets {', '.join(sorted(twice))} twice"
    needed = positional[len(call.args) : len(positional) - len(taken.defaults)]
    needed += [each.arg for each, value in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if value is None]
    missing = [name for name in needed if name not in given]
    return f"needs {', '.join(missing)}" if missing else ""


def faults(path: Path) -> Iterator[str]:
    """Yield what a file imports that is not there, and calls that its own or imported functions do not take."""
    for module, name in imports_of(path).values():
        if not exists(module, name):
            yield f"{path}: {module} has no {name}"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and (found := called(path, node.func)) is not None:
            taken = parameters(found)
            if taken is not None and (reason := misfit(node, taken)):
                yield f"{path}:{node.lineno}: {found.name} {reason}"


def test_programs_call_what_exists_with_what_it_takes() -> None:
    found = [fault for path in CALLERS for fault in faults(path)]
    assert not found, "\n".join(found)


PROGRAM = """
from contextlib import contextmanager
from dataclasses import dataclass, field
from tests import turns
from tests.linear_time import SMALL, grows_too_fast as grows
@contextmanager
def layout(only, options, *, cuts_links, delay=0.0): yield
@dataclass(frozen=True)
class Run:
    only: str
    seeds: list[int] = field(default_factory=list)
class Tail:
    def __init__(self, most, /, least=0): ...
class Other(Tail): ...
"""


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("layout(1, 2, cuts_links=True)", ""),
        ("layout(1, with_proxies=False)", "layout takes no with_proxies"),
        ("layout(1, 2, 3, cuts_links=True)", "layout takes 2 arguments by position, not 3"),
        ("layout(1, only=2, options=3, cuts_links=True)", "layout gets only twice"),
        ("layout(1, cuts_links=True)", "layout needs options"),
        ("layout(1, 2)", "layout needs cuts_links"),
        ("layout(*SMALL, **SMALL)", ""),
        ("layout(*SMALL, links=1)", "layout takes no links"),
        ("Run('a', seeds=[])", ""),
        ("Run()", "Run needs only"),
        ("Tail(1, least=2)", ""),
        ("Tail(most=1)", "Tail takes no most"),
        ("Other()", ""),
        ("grows(len, 1, large=2)", ""),
        ("grows(len, most=2)", "grows_too_fast takes no most"),
        ("turns.of_other_turns([], 1)", ""),
        ("turns.of_other_turns([])", "of_other_turns needs turn"),
        ("turns.of_every_turn([])", ""),
        ("from tests.turns import FILE", "tests.turns has no FILE"),
        ("from tests.turns import FILES", ""),
        ("from tests.turn import FILES", "tests.turn has no FILES"),
        ("from tests.soak import fuzz, models", ""),
        ("from tests.soak import fuzzing", "tests.soak has no fuzzing"),
    ],
)
def test_a_program_that_fails_is_found(call: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(f"{PROGRAM}\n{call}\n")
    found = [fault.rpartition(": ")[2] for fault in faults(path)]
    assert found == [reason] * bool(reason)
