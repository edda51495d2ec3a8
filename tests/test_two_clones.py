"""Two clones never mix: with an editable installation of one, a program run in the other imports the other's modules.

Both clones here are skeletons: this clone's links, and an empty file for each of its modules.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "tokenloom"
LINKS = [path for path in PACKAGE.iterdir() if path.is_symlink()]

FINDER = """
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

class Finder:
    '''Asked after sys.path, as the finder of an editable installation is.'''

    @staticmethod
    def find_spec(name, path=None, target=None):
        found = Path({clone!r}, *name.split("."))
        for file in (found / "__init__.py", found.with_suffix(".py")):
            if name.partition(".")[0] == "tokenloom" and file.exists():
                return spec_from_file_location(name, file)

sys.meta_path.append(Finder)
"""

IMPORT_ALL = """
import importlib, json, site, sys
site.addsitedir(sys.argv[1])
print(json.dumps({name: importlib.import_module(name).__file__ for name in json.load(sys.stdin)}))
"""


def modules_below(folder: Path) -> list[Path]:
    """Return the Python files of a folder, relative to it, without those behind links."""
    return [
        Path(directory, file).relative_to(folder)
        for directory, _, files in os.walk(folder)
        for file in files
        if file.endswith(".py")
    ]


def make_clone(clone: Path) -> Path:
    for folder in (PACKAGE, *(link.resolve() for link in LINKS)):
        for module in modules_below(folder):
            copy = clone / folder.relative_to(REPOSITORY) / module
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
    for link in LINKS:
        (clone / "tokenloom" / link.name).symlink_to(link.readlink())
    return clone


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("clones")
    return make_clone(directory / "installed"), make_clone(directory / "other")


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Every module of the package, by its dotted name."""
    folders = {"tokenloom": PACKAGE, **{f"tokenloom.{link.name}": link.resolve() for link in LINKS}}
    found = [".".join((name, *file.with_suffix("").parts)) for name in folders for file in modules_below(folders[name])]
    return [name.removesuffix(".__init__") for name in found]


@pytest.fixture(params=["path", "finder"])
def site_packages(request: pytest.FixtureRequest, tmp_path: Path, clones: tuple[Path, Path]) -> Path:
    """A folder with an editable installation of the first clone, in one of its two forms."""
    if request.param == "path":
        (tmp_path / "tokenloom.pth").write_text(f"{clones[0]}\n")
    else:
        (tmp_path / "tokenloom_finder.py").write_text(FINDER.format(clone=str(clones[0])))
        (tmp_path / "tokenloom.pth").write_text("import tokenloom_finder\n")
    return tmp_path


def clones_imported_from(names: list[str], site_packages: Path, cwd: Path, *options: str) -> set[str]:
    """Import the modules in a program that is run in ``cwd``. Return the names of the clones that they came from."""
    command = [sys.executable, "-E", "-S", *options, "-c", IMPORT_ALL, str(site_packages)]
    done = subprocess.run(command, cwd=cwd, input=json.dumps(names), capture_output=True, text=True, check=True)
    files: dict[str, str] = json.loads(done.stdout)
    assert len(files) == len(names)
    return {Path(file).relative_to(cwd.parent).parts[0] for file in files.values()}


def test_this_clone_has_its_links(names: list[str]) -> None:
    assert {link.name for link in LINKS} == {"bench", "engine_core", "gpu_worker", "services", "v1"}
    assert {"tokenloom.engine_core.core", "tokenloom.services.runtime", "tokenloom.v1.engine_pb2"} <= set(names)


def test_a_program_in_the_other_clone_imports_the_others_modules(
    clones: tuple[Path, Path], names: list[str], site_packages: Path
) -> None:
    assert clones_imported_from(names, site_packages, clones[1]) == {"other"}


def test_elsewhere_all_modules_come_from_the_installed_clone(
    clones: tuple[Path, Path], names: list[str], site_packages: Path
) -> None:
    elsewhere = clones[0].parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    assert clones_imported_from(names, site_packages, elsewhere) == {"installed"}
    assert clones_imported_from(names, site_packages, clones[1], "-P") == {"installed"}
