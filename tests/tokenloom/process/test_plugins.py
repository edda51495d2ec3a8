"""The registry of plugins: what is found, refused and loaded."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tokenloom.process import plugins

Install = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package where this process finds it, and forget its module at the end."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(name: str, points: Mapping[str, Mapping[str, str]], source: str = "", version: str = "1.0") -> None:
        monkeypatch.delitem(sys.modules, name.replace("-", "_"), raising=False)
        install(tmp_path, name, points, source, version)

    return put


def one(kind: str, target: str = "acme:plugin", name: str = "own") -> dict[str, dict[str, str]]:
    return {f"tokenloom.{kind}": {name: target}}


def test_a_package_is_described_without_being_imported(put: Install) -> None:
    put("acme", one("schedulers") | one("logits_processors"), "raise SystemExit('imported')", version="2.1")
    assert plugins.check_plugins(["Acme"], "engine") == ("acme",)
    assert plugins.check_choice("schedulers", ["fcfs"], "acme:own") == "acme:own"
    assert plugins.described(["acme"]) == ["acme 2.1 (logits_processors, schedulers)"]
    assert "acme" in plugins.installed_packages()
    assert "acme" not in sys.modules


@pytest.mark.parametrize(
    ("points", "names", "service", "reason"),
    [
        ({}, ["acme"], "engine", r"has no entry points in groups named tokenloom\.KIND"),
        ({"other.group": {"a": "acme:a"}}, ["acme"], "engine", "has no entry points"),
        (one("shedulers"), ["acme"], "engine", r"did you mean tokenloom\.schedulers"),
        (one("zzz"), ["acme"], "engine", "the kinds are logits_processors"),
        (one("schedulers", name="a:b"), ["acme"], "engine", "entry point 'a:b'; names have letters"),
        (one("model_architectures"), ["acme"], "tokenizer", r"has nothing for the tokenizer; it is for engine"),
        (one("fronts"), ["acme"], "engine", r"has nothing for the engine; it is for gateway"),
        (one("schedulers"), ["acme"], "gateway", r"acme 1\.0 \(schedulers\) has nothing for the gateway; .* engine"),
        (one("kv_connectors"), ["acme"], "gateway", "has nothing for the gateway; it is for engine"),
        (one("kv_connectors"), ["acme"], "coordinator", "has nothing for the coordinator"),
        (one("schedulers"), ["acme", "ACME"], "engine", "acme is named 2 times"),
        (one("schedulers"), ["acmee"], "engine", "no package acmee is installed; did you mean acme"),
        (one("schedulers"), ["../acme"], "engine", "is no name of a package"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused(
    put: Install, points: dict[str, dict[str, str]], names: list[str], service: str, reason: str
) -> None:
    put("acme", points)
    with pytest.raises(ValueError, match=reason):
        plugins.check_plugins(names, service)


@pytest.mark.parametrize("text", [b"[tokenloom.schedulers]\nown\n", b"[tokenloom.schedulers]\nown = \xff:f\n"])
def test_a_damaged_package_harms_no_other(put: Install, tmp_path: Path, text: bytes) -> None:
    """Any installed package may have such metadata; a doctor and the hint of a wrong name read them all."""
    put("acme", one("schedulers"))
    put("garbled", {})
    (tmp_path / "garbled-1.0.dist-info" / "entry_points.txt").write_bytes(text)
    assert "acme" in plugins.installed_packages()
    with pytest.raises(ValueError, match="no package acmee is installed; did you mean acme"):
        plugins.check_plugins(["acmee"], "engine")
    with pytest.raises(ValueError, match="the metadata of the package garbled are damaged; install it again"):
        plugins.check_plugins(["garbled"], "engine")


def test_a_package_without_metadata_has_no_version_that_could_tell_engines_apart(put: Install, tmp_path: Path) -> None:
    put("acme", one("logits_processors"))
    (tmp_path / "acme-1.0.dist-info" / "METADATA").unlink()
    with pytest.raises(ValueError, match="the metadata of the package acme are damaged"):
        plugins.check_plugins(["acme"], "engine")
    assert "acme" not in plugins.installed_packages()


@pytest.mark.parametrize("names", [[5], [None], [["acme"]]])
def test_what_is_no_text_names_no_package(names: list[Any]) -> None:
    with pytest.raises(ValueError, match="is no name of a package"):
        plugins.check_plugins(names, "engine")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("lifo", "must be one of fcfs, or PACKAGE:NAME of a plugin, not 'lifo'"),
        ("acme:other", r"acme 1\.0 has no other among its schedulers: own"),
        ("nobody:own", "no package nobody is installed"),
        (":own", "write PACKAGE:NAME"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused(put: Install, value: str, reason: str) -> None:
    put("acme", one("schedulers"))
    with pytest.raises(ValueError, match=reason):
        plugins.check_choice("schedulers", ["fcfs"], value)


def test_a_choice_needs_its_package_to_be_named(put: Install) -> None:
    put("acme", one("schedulers"), "plugin = len")
    plugins.check_named((), scheduling_policy="fcfs")
    with pytest.raises(ValueError, match="scheduling_policy is acme:own: name its package too, with --plugins acme"):
        plugins.check_named((), scheduling_policy="acme:own")
    with pytest.raises(ValueError, match="name its package too"):
        plugins.load("schedulers", "acme:own", ())
    assert plugins.load("schedulers", "acme:own", ("acme",)) is len


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("schedulers", "1 / 0", "cannot be loaded from acme:plugin: ZeroDivisionError"),
        ("schedulers", "raise SystemExit(3)", "cannot be loaded from acme:plugin: SystemExit: 3"),
        ("schedulers", "other = 1", "cannot be loaded from acme:plugin: AttributeError"),
        ("schedulers", "plugin = 1", "has nothing to call"),
        ("logits_processors", "plugin = 1", "has no arguments"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(put: Install, kind: str, source: str, reason: str) -> None:
    put("acme", one(kind), source)
    with pytest.raises(ValueError, match=rf"the plugin acme:own \({kind}\) {reason}"):
        plugins.load(kind, "acme:own", ("acme",))


def test_what_changes_tokens_marks_an_engine(put: Install) -> None:
    put("acme", one("schedulers"))
    put("zeta", one("logits_processors"), version="3.0")
    put("beta", one("logits_processors"), version="0.2")
    assert plugins.marks(("zeta", "acme", "beta"), "numerics") == ("plugin-beta-0.2", "plugin-zeta-3.0")


def test_commands_of_one_name_are_refused(put: Install) -> None:
    put("acme", one("cli_commands", "acme:run", "go"))
    put("beta", one("cli_commands", "beta:run", "go"))
    assert plugins.commands_of(["acme"]) == {"go": "acme:run"}
    with pytest.raises(ValueError, match="two packages have the command go"):
        plugins.commands_of(["acme", "beta"])


def test_the_example_has_one_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    package = plugins.find_package(EXAMPLE_NAME)
    assert {point.kind for point in package.points} == plugins.KINDS.keys()
    for point in package.points:
        plugins.load(point.kind, f"{EXAMPLE_NAME}:{point.name}", (EXAMPLE_NAME,))


def test_the_registry_costs_no_import_until_a_package_is_named() -> None:
    code = (
        "import sys; before = set(sys.modules); import tokenloom.process.plugins as plugins;"
        "plugins.check_plugins((), 'engine'); plugins.check_choice('schedulers', ('fcfs',), 'fcfs');"
        "plugins.marks((), 'numerics'); plugins.load_all('logits_processors', ());"
        "print('importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=_ROOT)
    assert done.stdout.strip() == "False"


_ROOT = Path(__file__).parents[3]
