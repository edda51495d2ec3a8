"""Finds the source files of a checkout and gives each file one name, whichever way the packages are laid out."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PRODUCT = ("tokenloom", "services", "engine_core", "gpu_worker")
"""The product's top-level folders."""

PACKAGES = {
    "tokenloom": "tokenloom",
    "services": "tokenloom.services",
    "engine_core": "tokenloom.engine_core",
    "gpu_worker": "tokenloom.gpu_worker",
    "benchmarks": "tokenloom.bench",
}
"""The import name of every top-level folder that is part of the package."""

ASIDE = ("benchmarks", "tests", "tools", "examples")
"""Top-level folders with Python code that is not part of the product."""

CONTRACTS = "protos"
"""The top-level folder with the contracts and the stubs generated from them."""


@dataclass(frozen=True)
class Source:
    """Describes one source file."""

    path: str
    """Relative to the checkout, from the real top-level folder: ``engine_core/core.py``."""
    text: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


class SourceTree:
    """Reads the source files of one checkout. Links inside the checkout are not followed, so each file counts once."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @cached_property
    def product(self) -> list[Source]:
        """Return the product's modules, without generated stubs."""
        return [source for folder in PRODUCT for source in self._read(folder, ".py")]

    @cached_property
    def aside(self) -> dict[str, list[Source]]:
        """Return the modules outside the product by top-level folder; a folder that does not exist is left out."""
        found = {folder: list(self._read(folder, ".py")) for folder in ASIDE}
        return {folder: sources for folder, sources in found.items() if sources}

    @cached_property
    def package(self) -> list[Source]:
        """Return the modules of the installed package: the product and the benchmarks."""
        return [*self.product, *self.aside.get("benchmarks", [])]

    @cached_property
    def contracts(self) -> list[Source]:
        """Return the ``.proto`` files."""
        return list(self._read(CONTRACTS, ".proto"))

    def _read(self, folder: str, suffix: str) -> Iterator[Source]:
        for path in sorted(_files(self.root / folder, suffix)):
            yield Source(path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8"))


def module_name(path: str) -> str | None:
    """Return the import name of a module of the package, given its path in the checkout; None for other files."""
    top, _, rest = path.partition("/")
    if top not in PACKAGES or not rest:
        return None
    parts = rest.removesuffix(".py").split("/")
    return ".".join([PACKAGES[top], *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        if path.is_dir():
            if not path.name.startswith(".") and path.name != "__pycache__":
                yield from _files(path, suffix)
        elif path.suffix == suffix and not path.stem.endswith(("_pb2", "_pb2_grpc")):
            yield path
