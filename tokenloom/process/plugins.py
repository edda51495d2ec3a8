"""The registry of plugins: which kinds there are, which services use them, and how one is found, checked and loaded.

A plugin comes from an installed package that has entry points in groups named ``tokenloom.KIND``. Its code runs only if
the package is named by ``--plugins``, and only in the services that use one of its kinds. Everything here but
:func:`load` and :func:`load_all` reads the metadata of packages and imports none of them, so that checks before a start
run no code of others. Whatever is wrong raises ``ValueError``, which says what would be right.

Nothing here imports other code of ours: worker, engine's front and gateway look packages up by the same rules.
"""

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

GROUP = "tokenloom."
"""What the group of each of our entry points begins with; the kind follows."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LISTED = 8


# Plain classes, here and below: every process imports this module, and a dataclass takes a millisecond to make.
class PluginKind:
    """Describes what all plugins of a kind have in common; ``docs/use/plugins.md`` shows how each is written.

    Attributes:
        services: Those that use plugins of this kind; ``cli`` is the command line.
        needs: Attributes that a plugin must have; without any, it is data, or is called itself.
        is_called: Whether a plugin is called itself.
        changes: What engines with different plugins of this kind do not share: ``numerics``: tokens, so that a request
            never moves from one to another; ``kv_layout``: KV blocks.
    """

    def __init__(
        self, *services: str, needs: Sequence[str] = (), is_called: bool = False, changes: Sequence[str] = ()
    ) -> None:
        self.services = services
        self.needs = needs
        self.is_called = is_called
        self.changes = changes


KINDS: Mapping[str, PluginKind] = {
    "logits_processors": PluginKind("engine", needs=("arguments",), changes=("numerics",)),
    "schedulers": PluginKind("engine", is_called=True),
    "executors": PluginKind("engine", is_called=True),
    "platforms": PluginKind("engine", is_called=True, changes=("numerics",)),
    "model_architectures": PluginKind("engine", changes=("numerics",)),
    "checkpoint_formats": PluginKind("engine", is_called=True, changes=("numerics",)),
    "attention_backends": PluginKind("engine", is_called=True, changes=("numerics", "kv_layout")),
    "kv_transports": PluginKind("engine", is_called=True, changes=("kv_layout",)),
    "kv_connectors": PluginKind("engine", is_called=True, changes=("kv_layout",)),
    "grammar_backends": PluginKind("engine", is_called=True, changes=("numerics",)),
    "stat_loggers": PluginKind("engine", needs=("log",)),
    "tool_formats": PluginKind("gateway"),
    "reasoning_formats": PluginKind("gateway", "engine"),
    "placement_rules": PluginKind("coordinator", is_called=True),
    "authentication": PluginKind("gateway", is_called=True),
    "fronts": PluginKind("gateway", is_called=True),
    "chat_templates": PluginKind("tokenizer", "engine"),
    "cli_commands": PluginKind("cli"),
}
"""The kinds by the last part of their group."""


class PluginPoint(NamedTuple):
    """One entry point.

    Attributes:
        kind: A key of :data:`KINDS`.
        name: Unique among those of the kind in a package.
        target: ``module:attribute``, what is loaded.
    """

    kind: str
    name: str
    target: str


class PluginPackage:
    """An installed package with plugins."""

    def __init__(self, name: str, version: str, points: tuple[PluginPoint, ...]) -> None:
        self.name = name
        self.version = version
        self.points = points

    def of_kind(self, kind: str) -> tuple[PluginPoint, ...]:
        """Return its plugins of this kind."""
        return tuple(point for point in self.points if point.kind == kind)

    def is_used_by(self, service: str) -> bool:
        """Return whether a service uses any of its plugins."""
        return any(service in KINDS[point.kind].services for point in self.points)

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(point.kind for point in self.points))
        return f"{self.name} {self.version} ({kinds})"


class LoadedPlugin(NamedTuple):
    """What an entry point names, imported, with the ``PACKAGE:NAME`` under which options and errors name it."""

    named: str
    value: Any


def normalized(name: str) -> str:
    """Return the spelling of a package's name that all its spellings share."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_package(name: str) -> PluginPackage:
    """Return the package of this name with its plugins, without importing it."""
    from importlib import metadata  # here, so that a process without plugins does not import it

    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a package; write the one that pip lists")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise ValueError(f"no package {name} is installed{_installed_near(name)}") from None
    points = _points_of(found)
    if points is None or not isinstance(found.version, str):
        raise ValueError(f"the metadata of the package {name} are damaged; install it again")
    package = PluginPackage(normalized(name), found.version, points)
    _check_points(package)
    return package


def installed_packages() -> list[str]:
    """Return the names of all installed packages that have entry points of ours, in order."""
    from importlib import metadata

    found = [each for each in metadata.distributions() if _points_of(each)]
    return sorted({normalized(each.name) for each in found if isinstance(each.name, str)})


def check_plugins(names: Sequence[str], service: str) -> tuple[str, ...]:
    """Return the names of the packages in their common spelling, after checking that each is installed, is named once,
    and has something for this service."""
    if wrong := [name for name in names if not isinstance(name, str)]:  # of a program's own list
        raise ValueError(f"{wrong[0]!r} is no name of a package; write the one that pip lists")
    common = tuple(map(normalized, names))
    for name, count in Counter(common).items():
        if count > 1:
            raise ValueError(f"{name} is named {count} times")
        package = find_package(name)
        if not package.is_used_by(service):
            users = sorted({each for point in package.points for each in KINDS[point.kind].services})
            raise ValueError(f"{package} has nothing for the {service}; it is for {' and '.join(users)}")
    return common


def used_by(names: Iterable[str], service: str) -> list[str]:
    """Return those of these packages that a service uses."""
    return [name for name in names if find_package(name).is_used_by(service)]


def check_choice(kind: str, built_in: Sequence[str], value: str) -> str:
    """Return the value of an option that names something built in, or a plugin as ``PACKAGE:NAME``."""
    if value in built_in or not (value or built_in):
        return value
    if ":" not in value:
        listed = f"one of {', '.join(built_in)}, or " if built_in else ""
        raise ValueError(f"must be {listed}PACKAGE:NAME of a plugin, not {value!r:.80}")
    package, name = _split(value)
    _find_point(find_package(package), kind, name)
    return f"{package}:{name}"


def plugged(kind: str, built_in: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``Meta(extra=…)`` for an option whose value is one of ``built_in`` or names a plugin of this kind."""
    return {"choices": tuple(built_in), "check": partial(check_choices, kind, built_in)}


def check_choices(kind: str, built_in: Sequence[str], value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the value of such an option, or of one that lists several."""
    if isinstance(value, str):
        return check_choice(kind, built_in, value)
    return tuple(check_choice(kind, built_in, each) for each in value)


def check_named(plugins: Sequence[str], **values: str) -> None:
    """Raise ``ValueError`` if an option names a plugin of a package that is not among ``plugins``."""
    for option, value in values.items():
        package = value.partition(":")[0]
        if ":" in value and package not in plugins:
            raise ValueError(f"{option} is {value}: name its package too, with --plugins {package}")


def load(kind: str, named: str, plugins: Sequence[str]) -> Any:
    """Import the plugin that an option names as ``PACKAGE:NAME``; its package is among ``plugins``."""
    check_named(plugins, **{kind: named})
    package, name = _split(named)
    return _load(find_package(package), kind, name).value


def load_part(kind: str, name: str, built_in: Mapping[str, str], plugins: Sequence[str]) -> Any:
    """Import what an option names: a plugin as ``PACKAGE:NAME``, or the target ``module:attribute`` of something built
    in. Raises ``ImportError`` where a library that this needs is not installed."""
    if ":" in name:
        return load(kind, name, plugins)
    module, _, attribute = built_in[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_all(kind: str, plugins: Sequence[str]) -> list[LoadedPlugin]:
    """Import every plugin of this kind in these packages, in the order of the packages and of the names."""
    packages = map(find_package, plugins)
    return [_load(package, kind, point.name) for package in packages for point in package.of_kind(kind)]


def commands_of(plugins: Sequence[str]) -> dict[str, str]:
    """Return where the commands of these packages are, as ``module:function``, by name."""
    places: dict[str, str] = {}
    for point in (point for name in plugins for point in find_package(name).of_kind("cli_commands")):
        if point.name in places:
            raise ValueError(f"two packages have the command {point.name}: name one of them")
        places[point.name] = point.target
    return places


def marks(plugins: Sequence[str], changes: str) -> tuple[str, ...]:
    """Return what the packages whose plugins change ``numerics``, or ``kv_layout``, add to an engine's: names with
    versions."""
    packages = [find_package(name) for name in sorted(plugins)]
    return tuple(
        f"plugin-{package.name}-{package.version}"
        for package in packages
        if any(changes in KINDS[point.kind].changes for point in package.points)
    )


def kv_marks(named: Iterable[str]) -> tuple[str, ...]:
    """Return what plugins that an engine uses for its KV, as ``PACKAGE:NAME``, add to its ``kv_layout``; other names
    are built in and add nothing."""
    plugged_in = [each for each in named if ":" in each]
    packages = [find_package(each.partition(":")[0]) for each in plugged_in]
    return tuple(
        f"plugin-{package.name}-{package.version}/{each}" for package, each in zip(packages, plugged_in, strict=True)
    )


def described(plugins: Sequence[str]) -> list[str]:
    """Return the packages with their versions and kinds, for people."""
    return [str(find_package(name)) for name in plugins]


def _points_of(found: Any) -> tuple[PluginPoint, ...] | None:
    """Return the entry points of ours of a distribution; None: they cannot be read."""
    try:
        ours = [entry for entry in found.entry_points if entry.group.startswith(GROUP)]
    except (AttributeError, OSError, TypeError, ValueError):
        return None
    return tuple(sorted(PluginPoint(entry.group.removeprefix(GROUP), entry.name, entry.value) for entry in ours))


def _check_points(package: PluginPackage) -> None:
    about = f"the package {package.name} {package.version}"
    if not package.points:
        raise ValueError(f"{about} has no entry points in groups named {GROUP}KIND (docs/use/plugins.md)")
    for point in package.points:
        if point.kind not in KINDS:
            near = _near(point.kind, KINDS)
            hint = f"; did you mean {GROUP}{near[0]}?" if near else f"; the kinds are {', '.join(KINDS)}"
            raise ValueError(f"{about} has an entry point in the group {GROUP}{point.kind}, which is unknown{hint}")
        if not _NAME.fullmatch(point.name):
            raise ValueError(f"{about} has an entry point {point.name!r}; names have letters, digits and - _ . only")
    [(named, count)] = Counter(point[:2] for point in package.points).most_common(1)
    if count > 1:
        raise ValueError(f"{about} has {count} entry points {named[1]} in the group {GROUP}{named[0]}; one is possible")


def _split(named: str) -> tuple[str, str]:
    package, _, name = named.partition(":")
    if not _NAME.fullmatch(package) or not _NAME.fullmatch(name):
        raise ValueError(f"{named!r:.80} is no plugin; write PACKAGE:NAME")
    return normalized(package), name


def _find_point(package: PluginPackage, kind: str, name: str) -> PluginPoint:
    points = package.of_kind(kind)
    for point in points:
        if point.name == name:
            return point
    names = ", ".join(point.name for point in points) or "none"
    raise ValueError(f"{package.name} {package.version} has no {name} among its {kind}: {names}")


def _load(package: PluginPackage, kind: str, name: str) -> LoadedPlugin:
    from importlib import metadata

    point, about = _find_point(package, kind, name), f"the plugin {package.name}:{name} ({kind})"
    try:
        value = metadata.EntryPoint(point.name, point.target, GROUP + kind).load()
    except (Exception, SystemExit) as error:  # whatever the code of others does when it is imported
        raise ValueError(f"{about} cannot be loaded from {point.target}: {type(error).__name__}: {error}") from error
    missing = [need for need in KINDS[kind].needs if not hasattr(value, need)]
    if missing or (KINDS[kind].is_called and not callable(value)):
        lacks = f"no {' and no '.join(missing)}" if missing else "nothing to call"
        raise ValueError(f"{about} has {lacks}: {point.target} is no plugin of this kind (docs/use/plugins.md)")
    return LoadedPlugin(f"{package.name}:{name}", value)


def _near(name: str, names: Iterable[str]) -> list[str]:
    import difflib  # here, because only an error needs it

    return difflib.get_close_matches(name, names, n=1)


def _installed_near(name: str) -> str:
    installed = installed_packages()
    near = _near(normalized(name), installed)
    if near:
        return f"; did you mean {near[0]}?"
    listed = ", ".join(installed[:_LISTED])
    return f"; those with plugins here are {listed}" if listed else "; no installed package has plugins"
