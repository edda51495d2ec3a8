"""The locks of the images against pyproject.toml, the Dockerfile and the Makefile."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "locks"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)
NAMES = ("build", "engine-cpu", "engine-cuda", "ray", "service", "tools")
FIXED = {
    "cryptography": "50.0.0",
    "h11": "0.16.0",
    "jinja2": "3.1.6",
    "protobuf": "6.33.5",
    "pygments": "2.20.0",
    "python-multipart": "0.0.22",
    "setuptools": "78.1.1",
    "tokenizers": "0.23.1",
    "torch": "2.11.0",
    "tqdm": "4.66.3",
    "uvicorn": "0.11.7",
}
"""The first release without the vulnerabilities that are known of a package."""
FIXED_FOR_DEVELOPMENT = {"pytest": "9.0.3", "transformers": "5.10.0"}


def locked(name: str) -> dict[str, tuple[Version, int]]:
    """Return the version of each package of a lock, and the number of its hashes."""
    entries = re.findall(
        r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", _text(name), re.M
    )
    return {
        canonicalize_name(package): (Version(version), hashes.count("--hash")) for package, version, hashes in entries
    }


def _text(name: str) -> str:
    return (LOCKS / f"{name}.txt").read_text()


EXTRAS = ("engine", "transformers", "encoder", "cuda", "xgrammar", "nixl", "mcp", "ray", "dev")


def needed(*extras: str) -> list[Requirement]:
    project = PROJECT["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return list(map(Requirement, lines))


@pytest.mark.parametrize("name", NAMES)
def test_every_line_names_one_version_with_its_hashes_and_no_address(name: str) -> None:
    text = _text(name)
    packages = locked(name)
    assert packages
    unindented = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(unindented) == len(packages), "a line is no exact version with hashes"
    assert "://" not in text
    assert not re.search(r"index|find-links|@ ", "\n".join(unindented))


def test_no_other_lock_is_there() -> None:
    assert {path.name for path in LOCKS.iterdir()} == {f"{name}.txt" for name in NAMES} | {"tools.in"}


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("service", needed()),
        ("engine-cpu", needed("engine", "encoder")),
        ("engine-cuda", needed("engine", "encoder")),
        ("ray", [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["ray"]]),
        ("build", [Requirement(line) for line in PROJECT["build-system"]["requires"]]),
        ("tools", [Requirement(line) for line in (LOCKS / "tools.in").read_text().splitlines() if line[0] != "#"]),
    ],
)
def test_a_lock_is_within_the_bounds(name: str, requirements: list[Requirement]) -> None:
    packages = locked(name)
    for each in requirements:
        assert canonicalize_name(each.name) in packages, f"{each}: run `make lock`"
        version = packages[canonicalize_name(each.name)][0]
        assert each.specifier.contains(version, prereleases=True), f"{name}: {version} is not {each}; run `make lock`"


@pytest.mark.parametrize("name", NAMES)
def test_no_lock_holds_a_release_with_a_known_vulnerability(name: str) -> None:
    for package, (version, _) in locked(name).items():
        if package in FIXED:
            assert version >= Version(FIXED[package]), package


def test_no_lower_bound_admits_a_release_with_a_known_vulnerability() -> None:
    fixed = FIXED | FIXED_FOR_DEVELOPMENT
    direct = [*needed(*EXTRAS), *map(Requirement, PROJECT["build-system"]["requires"])]
    checked = set()
    for each in direct:
        bounds = [Version(one.version) for one in each.specifier if one.operator == ">="]
        assert bounds, f"{each} has no lower bound"
        if (name := canonicalize_name(each.name)) in fixed:
            checked.add(name)
            assert max(bounds) >= Version(fixed[name]), each
    assert checked == fixed.keys() - {"h11", "pygments"}  # these come with other packages


def test_every_dependency_has_a_reason() -> None:
    entries = re.findall(r'^    "[A-Za-z][^"]*[<>=][^"]*",(.*)$', PYPROJECT, re.M)
    groups = [line for group in PROJECT.get("dependency-groups", {}).values() for line in group]
    assert len(entries) == len(needed(*EXTRAS)) + len(groups)
    assert all(re.match(r" +# \S", rest) for rest in entries)


def test_every_image_installs_its_lock_and_nothing_else() -> None:
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.M)
    building = {match[1]: stage for stage in stages if (match := re.match(r"\S+ AS (\S+)-venv\n", stage))}
    assert set(building) == {"service", "engine-cpu", "engine-cuda"}
    for target, stage in building.items():
        commands = re.findall(r"pip install (.*?)(?=&&|\n|\Z)", stage.replace("\\\n", " "), re.S)
        assert len(commands) == 2
        dependencies, package = commands
        assert "--require-hashes" in dependencies
        dependencies, optional, rest = dependencies.partition('${EXTRA:+-r "locks/$EXTRA.txt"}')
        assert bool(optional) == target.startswith("engine")
        assert ("ARG EXTRA=\n" in stage) == bool(optional), "no extra unless the build names one"
        assert re.findall(r"-r (\S+)", dependencies) == ["locks/build.txt", f"locks/{target}.txt"]
        assert not rest.strip()
        assert package.split()[-1] == "."
        assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(package.split())
    assert "!locks" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("engine", ["engine-cpu", "engine-cuda"])
def test_ray_is_locked_with_the_versions_of_the_engines(engine: str) -> None:
    ray, others = locked("ray"), locked(engine)
    assert {name: ray[name][0] for name in ray.keys() & others.keys()} == {
        name: others[name][0] for name in ray.keys() & others.keys()
    }
    assert "ray" not in others, "the image of all others stays as small as it is"


def test_the_locks_hold_the_torch_that_is_tested() -> None:
    (version,) = re.findall(r"^TORCH_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert locked("engine-cuda")["torch"][0] == Version(version)
    assert locked("engine-cpu")["torch"][0] == Version(f"{version}+cpu")
    assert not any(package.startswith("nvidia") for package in locked("engine-cpu"))
    assert "torch" not in locked("service")
