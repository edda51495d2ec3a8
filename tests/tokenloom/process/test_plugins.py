"""The registry of plugins: what is found, refused and loaded, and how arguments are checked."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
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

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ban": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 2},
        "mode": {"enum": ["soft", "hard", 1]},
        "scale": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 2},
        "words": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 2}}, "required": ["a"],
                  "additionalProperties": False},
    },
    "required": ["ban"],
}  # fmt: skip
OTHER = {"properties": {"flag": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"ban": [1, 2.0]}, ""),
        ({"ban": [1], "mode": "soft", "scale": None, "words": {"a": "xy"}, "flag": True}, ""),
        ({"flag": False}, ""),  # the first schema is not asked
        ({}, ""),
        ({"mode": "soft"}, "needs ban"),
        ({"ban": []}, "ban must be a list of at least 1 items"),
        ({"ban": [1, 2, 3]}, "ban must be a list of at most 2 items"),
        ({"ban": [1, -1]}, "ban[1] must be at least 0"),
        ({"ban": [True]}, "ban[0] must be of the type integer, not true"),
        ({"ban": "1"}, 'ban must be of the type array, not "1"'),
        ({"ban": [1], "mode": True}, 'mode must be one of ["soft", "hard", 1], not true'),
        ({"ban": [1], "scale": 0}, "scale must be above 0"),
        ({"ban": [1], "scale": 2.5}, "scale must be at most 2"),
        ({"ban": [1], "words": {"b": 1}}, "words needs a"),
        ({"ban": [1], "words": {"a": "x", "b": 1}}, "words.b is unknown"),
        ({"ban": [1], "words": {"a": "xyz"}}, "words.a must be a text of at most 2 characters"),
        ({"bna": [1]}, "no plugin of the engines reads 'bna'; they read: ban, flag, mode, scale, words"),
    ],
)
def test_arguments_obey_their_schema(arguments: dict[str, Any], problem: str) -> None:
    schemas = [plugins.check_schema(SCHEMA), plugins.check_schema(OTHER)]
    assert plugins.problem_of(json.dumps(arguments), schemas) == problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (str(2**64 - 1), ""),
        (str(-(2**63)), ""),
        (str(2**64), "a whole number has more than 64 bits"),
        ("1" * 400, "a whole number has more than 64 bits"),  # as a float it is too large to be compared
        ("[-9223372036854775809]", "a whole number has more than 64 bits"),
        ("[1e400]", "a number is too large"),
        ('{"a": ["\\ud83d"]}', "a text holds half of a surrogate pair"),
        ('{"\\ude00": 1}', "a text holds half of a surrogate pair"),
        ('"\\ud83d\\ude00"', ""),
        ("[" * 30 + "]" * 30, ""),
        ("[" * 40 + "]" * 40, "it is nested more than 32 deep"),
    ],
)
def test_arguments_that_no_core_can_be_sent_are_refused(value: str, problem: str) -> None:
    """Each once raised an error that was not the request's, where a schema compared it or when it was sent."""
    schema = plugins.check_schema({"properties": {"any": {"minimum": -(2**63)}}})
    text = f'{{"any": {value}}}'
    assert plugins.problem_of(text, [schema]) == problem
    if not problem:
        msgspec.msgpack.encode(json.loads(text))


@pytest.mark.parametrize("text", ["", "[1]", "1", '{"ban": [NaN]}', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    assert plugins.problem_of(text, [plugins.check_schema(SCHEMA)])


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (None, "must be an object with properties"),
        ({"properties": {}}, "must be an object with properties"),
        ({"type": "array", "properties": {"a": {}}}, "has the type 'array'; it must be object"),
        ({"properties": {"a": {"pattern": "x"}}}, "the schema of a has pattern; checked are additionalProperties"),
        ({"properties": {"a": {"type": "int"}}}, "the schema of a has the type 'int'; the types are boolean"),
        ({"properties": {"a": {"items": 1}}}, r"the schema of a\[\] must be an object, not 1"),
        ({"properties": {"a": {"additionalProperties": {}}}}, "additionalProperties true or false"),
        ({"properties": {"a": {"enum": 5}}}, "the schema of a must have as enum a list of values, not 5"),
        ({"properties": {"a": {"enum": "soft"}}}, "as enum a list of values, not 'soft'"),
        ({"properties": {"a": {"minimum": "0"}}}, "as minimum a number, not '0'"),
        ({"properties": {"a": {"exclusiveMinimum": True}}}, "as exclusiveMinimum a number, not True"),
        ({"properties": {"a": {"maxItems": -1}}}, "as maxItems a whole number, not -1"),
        ({"properties": {"a": {"type": ["integer", []]}}}, "as type a name or names"),
        ({"properties": {"a": {"type": []}}}, "as type a name or names"),
        ({"properties": {"a": {"properties": ["b"]}}}, r"as properties an object, not \['b'\]"),
        ({"properties": {"a": {"required": "b"}}}, "as required a list of names, not 'b'"),
        ({"properties": {"a": {}}, "required": ["b"]}, "the arguments requires 'b', which is none of its properties"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plugins.check_schema(schema)


def test_two_plugins_declare_no_common_argument() -> None:
    one, two = plugins.check_schema(SCHEMA), plugins.check_schema({"properties": {"ban": {}}})
    plugins.check_apart({"a:x": one, "b:y": plugins.check_schema(OTHER)})
    with pytest.raises(ValueError, match="the plugins a:x and b:y both declare the argument ban"):
        plugins.check_apart({"a:x": one, "b:y": two})
