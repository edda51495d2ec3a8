"""What docstrings and comments refer to exists: modules move and classes change their names, and no import notices.

A reference with a path begins at the module's folder, as a relative import does, or with ``tokenloom.``. A name alone,
with or without a dot before it, is found where it is unique, so it must only exist somewhere in the product.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("engine_core", "gpu_worker", "services", "tokenloom")
PRODUCT = [
    path
    for part in PARTS
    for path in sorted((ROOT / part).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]
_REFERENCE = re.compile(r":(?:class|meth|func|attr|data|mod):`~?(\.*)([\w.]+)`")
# Classes, functions, variables, fields, attributes that are set, and imported names.
_DEFINED = re.compile(r"(?:class|def|import|as) (\w+)|^ *(?:self\.)?(\w+)(?:, \w+)* *[:=]|^    (\w+),$", re.MULTILINE)


@cache
def defined_in(path: Path) -> frozenset[str]:
    groups = _DEFINED.findall(path.read_text(encoding="utf-8"))
    return frozenset(name for group in groups for name in group if name)


@cache
def all_names() -> frozenset[str]:
    return frozenset({*(path.stem for path in PRODUCT)}.union(*map(defined_in, PRODUCT)))


def resolves(source: Path, dots: str, name: str) -> bool:
    """Return whether ``name``, which the file ``source`` refers to, exists."""
    parts = name.split(".")
    if parts[0] == "tokenloom":
        folder, parts = ROOT / "tokenloom", parts[1:]
    elif dots and len(parts) > 1:
        folder = source.parents[len(dots) - 1]
    else:
        return all_names().issuperset(parts) or (source.parents[len(dots) or 1] / name).is_dir()
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return True
    module = folder / f"{parts[0]}.py"
    if module.is_file():
        return defined_in(module).issuperset(parts[1:])
    # A class of this very file or package, and its attribute.
    return parts[0][0].isupper() and all_names().issuperset(parts)


def test_what_docstrings_and_comments_refer_to_exists() -> None:
    missing = []
    for path in PRODUCT:
        text = path.read_text(encoding="utf-8")
        for match in _REFERENCE.finditer(text):
            if not resolves(path, match[1], match[2]):
                line = text.count("\n", 0, match.start()) + 1
                missing.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("dots", "name", "exists"),
    [
        (".", "step_planner.StepPlanner.plan", True),
        (".", "StepPlanner.plan", True),
        (".", "step_planner.StepPlaner", False),
        (".", "planner_of_steps.StepPlanner", False),
        ("..", "data.request.Request", True),
        ("..", "request.Request", False),
        ("", "StepPlanner", True),
        ("", "StepPlaner", False),
        ("", "tokenloom.engine_core.core.EngineCore.step", True),
        ("", "tokenloom.engine_core.core.EngineCore.stop", False),
        ("", "tokenloom.engine_core.wire", True),
        ("", "tokenloom.LLM.encode", True),
    ],
)
def test_a_reference_resolves_as_an_import_from_its_module_does(dots: str, name: str, exists: bool) -> None:
    assert resolves(ROOT / "engine_core/scheduling/scheduler.py", dots, name) is exists
