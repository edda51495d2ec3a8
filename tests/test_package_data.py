"""A wheel holds every file that the package reads: stubs, sources of kernels, pages, the demo model."""

import fnmatch
import os
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE_DATA: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
    "package-data"
]
NOT_SHIPPED = {"__pycache__", "prebuilt", ".pytest_cache", ".mypy_cache", ".ruff_cache", "node_modules"}
KINDS_NOT_SHIPPED = {".py", ".md", ".pyc", ".binpb", ".sh"}


def data_files() -> list[tuple[str, str]]:
    """Every file beside the modules, as its package and its path in there."""
    found = []
    for folder, folders, files in os.walk(ROOT / "tokenloom", followlinks=True):
        folders[:] = [name for name in folders if name not in NOT_SHIPPED]
        package = Path(folder)
        while not (package / "__init__.py").is_file():
            package = package.parent
        name = ".".join(package.relative_to(ROOT).parts)
        for file in files:
            path = Path(folder, file).relative_to(package)
            if path.suffix not in KINDS_NOT_SHIPPED:
                found.append((name, path.as_posix()))
    return sorted(found)


@pytest.mark.parametrize(("package", "file"), data_files())
def test_every_data_file_is_in_the_wheel(package: str, file: str) -> None:
    assert any(fnmatch.fnmatch(file, pattern) for pattern in PACKAGE_DATA.get(package, ())), f"{package}: {file}"


def test_kernels_that_were_built_ahead_are_in_the_wheel() -> None:
    patterns = PACKAGE_DATA["tokenloom.gpu_worker.kernels"]
    assert any(fnmatch.fnmatch("prebuilt/x86-64-v3/fused-0123456789abcdef.so", pattern) for pattern in patterns)
