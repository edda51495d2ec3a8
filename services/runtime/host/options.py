"""Options: the table behind flags, environment variables, configuration files, keywords and the reference page.

A field of a settings struct is an option if its type is ``Annotated`` with a text that describes it. Bounds are those
of a ``msgspec.Meta``. A field that holds another struct is a group: the options in it are offered under flat names.
``Meta.extra`` may hold:

- ``name``: the option's name, where the field's name is too short outside of its struct;
- ``aliases``: further names that are accepted (vLLM's, or former ones);
- ``renamed``: former values, each with the value that replaces it;
- ``unsupported``: values that users of other servers know, each with a text that names the alternative;
- ``choices``: what is built in, where plugins may add more (``check`` knows them);
- ``check``: a function that returns the value to use, or raises ``ValueError`` for a wrong one;
- ``on_gpu``: the default where the model computes on a GPU (:func:`gpu_defaults`);
- ``directory``: True if the path is that of a directory, which may be created;
- ``secret``: True if the value must not appear in a list of processes or in an error.
"""

import difflib
import json
import logging
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta, Struct


def read_file(path: Path) -> dict[str, Any]:
    """Return the values of the file, names with underscores. Raises ``ValueError`` that names the file."""
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ValueError(f"--config: expected a .toml, .json or .yaml file, not {path.name!r}")
    try:
        values = parse(path.read_text())
    except OSError as error:
        raise ValueError(f"--config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the latter: brackets nested beyond the stack
        raise ValueError(f"--config: {path.name} cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config: {path.name} does not hold a table of settings")
    return _with_underscores(values)


def flattened(values: Mapping[str, Any], tables: Collection[str]) -> dict[str, Any]:
    """Return the values with those of the named tables moved to the top."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if name in tables and isinstance(value, Mapping) else {name: value}
    return flat


def _with_underscores(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key).replace("-", "_"): _with_underscores(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def _read_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ValueError("PyYAML is not installed; install it, or use .toml or .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its text repeats the line, which may hold a key
        where = "" if error.problem_mark is None else f" (at line {error.problem_mark.line + 1})"
        raise ValueError(f"{error.problem}{where}") from None
    except yaml.YAMLError:
        raise ValueError("it holds characters that YAML does not allow") from None


_PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


log = logging.getLogger(__name__)

_Settings = TypeVar("_Settings", bound=Struct)
_SWITCH = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path", tuple: "a list"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class OptionError(ValueError):
    """An option is missing or has a wrong value. ``name`` is the option's, as the user wrote it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class UnknownOption(OptionError):
    """No option has this name; ``reason`` holds similar ones."""


@dataclass(frozen=True)
class Option:
    """One option, from the annotation of its field."""

    name: str
    path: tuple[str, ...]
    """The names of the fields that lead to the value, outermost first."""
    group: str
    """The topic of the struct that defines the option, for headings: ``Scheduler``."""
    annotation: Any
    default: Any
    """``msgspec.NODEFAULT``: the option is required."""
    text: str
    extra: Mapping[str, Any]
    type: type
    """``bool``, ``int``, ``float``, ``str``, ``Path``, ``tuple``, or a struct that users write as JSON."""
    is_optional: bool
    """Whether None is a value."""
    choices: tuple[str, ...]
    """The possible values, or items of a list; empty: type and bounds decide."""
    bounds: tuple[str, ...]
    """Such as ``≥ 1``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.extra.get("aliases", ()))

    @property
    def variable(self) -> str:
        """The environment variable that sets this option."""
        return variable(self.name)

    @property
    def expected(self) -> str:
        """What a value must be, in a few words: ``an integer ≥ 1``."""
        if self.choices:
            listed = ("a list of " if self.type is tuple else "one of ") + ", ".join(self.choices)
            return f"{listed}, or PACKAGE:NAME of a plugin" if "choices" in self.extra else listed
        kind = "a JSON object" if issubclass(self.type, Struct) else _KINDS[self.type]
        return f"{kind} {', '.join(self.bounds)}".rstrip()

    @property
    def kind(self) -> str:
        """The same without an article, for tables."""
        return self.expected.removeprefix("an ").removeprefix("a ")

    @property
    def default_text(self) -> str:
        """The default as a user would write it; empty: not set."""
        return "" if self.default in (NODEFAULT, None, ()) else self.text_of(self.default)

    def parse(self, value: object, *, strict: bool = False) -> Any:
        """Return the value in the type of the field. Raises ``ValueError`` with what the value must be.

        ``strict``: numbers and switches must not be written as text, as they are in flags and variables.
        """
        plain = self._converted_text(self._current(value), strict=strict)
        if issubclass(self.type, Struct):
            return self._struct(plain)
        try:
            is_strict = strict and self.type is not tuple  # the items of a list were made texts
            parsed = msgspec.convert(plain, self.annotation, strict=is_strict, dec_hook=lambda type, item: type(item))
            if isinstance(parsed, float) and not math.isfinite(parsed):  # bounds let infinity and NaN pass
                raise msgspec.ValidationError
        except msgspec.ValidationError:
            shown = "" if self.extra.get("secret") else f", not {value!r:.80}"
            raise ValueError(f"must be {self.expected}{shown}{self._alternative(value)}") from None
        check = self.extra.get("check")
        return parsed if check is None else check(parsed)

    def text_of(self, value: object) -> str:
        """Write a parsed value in the form that :meth:`parse` reads."""
        if isinstance(value, Struct):
            return msgspec.json.encode(value).decode()
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    def _struct(self, value: object) -> Any:
        """Return a struct from JSON, from a table of a file, or from itself."""
        try:
            return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, self.annotation)
        except (msgspec.DecodeError, RecursionError) as error:  # the latter: brackets nested beyond the stack
            known = ", ".join(field.name for field in msgspec.structs.fields(self.type))
            raise ValueError(f"{error}; expected {self.expected} with keys among {known}") from None

    def _current(self, value: object) -> object:
        renamed = self.extra.get("renamed", {})
        if not isinstance(value, str) or value not in renamed:
            return value
        log.warning("%s: %s is deprecated; use %s", self.name, value, renamed[value])
        return renamed[value]

    def _alternative(self, value: object) -> str:
        texts = self.extra.get("unsupported", {})
        return f"; {texts[value]}" if isinstance(value, str) and value in texts else ""

    def _converted_text(self, value: object, *, strict: bool) -> object:
        if self.type is tuple and isinstance(value, (str, list, tuple)):
            items = [value] if isinstance(value, str) else value
            return [part.strip() for item in items for part in str(item).split(",") if part.strip()]
        if not isinstance(value, str):
            return value
        if self.is_optional and (value.lower() in ("none", "null") or (self.type is Path and not value)):
            return None
        return _SWITCH.get(value.lower(), value) if self.type is bool and not strict else value


def exposed(shown: str, variables: Collection[str], file: str = "") -> str:
    """Return the warning that a command line shows a secret.

    Args:
        shown: The flag that was used.
        variables: The environment variables that hold the secret without showing it.
        file: The flag for a file with it; empty: this does not exist.
    """
    others = " or ".join(variables) + (f", or pass {file}," if file else "")
    return f"{shown}: every user of this machine can read this secret in the list of processes; set {others} instead"


def file_flag(name: str, options: Collection[str]) -> str:
    """Return the flag for a file with the values of an option; empty if ``options`` has none."""
    return flag(f"{name}_file") if f"{name}_file" in options else ""


def variable(name: str) -> str:
    """Return the environment variable of an option."""
    return f"TOKENLOOM_{name.upper()}"


def flag(name: str) -> str:
    """Return an option's name as a flag."""
    return "--" + name.replace("_", "-")


def options_of(settings: type[Struct] | Struct) -> Mapping[str, Option]:
    """Return the options of a settings struct by name; the defaults are those of the instance, if one is given."""
    if isinstance(settings, type):
        return _options_of_type(settings)
    return {option.name: option for option in _walk(type(settings), settings, ())}


@cache
def _options_of_type(struct: type[Struct]) -> Mapping[str, Option]:
    return {option.name: option for option in _walk(struct, None, ())}


def build(settings: type[_Settings] | _Settings, values: Mapping[str, object], *, strict: bool = False) -> _Settings:
    """Make settings from values of options by flat name; an instance is copied with these values.

    Raises :class:`OptionError` for an unknown, wrong or missing option, ``ValueError`` if values contradict each other.
    """
    options, changes = options_of(settings), dict[str, Any]()
    for name, value in values.items():
        option = find_option(options, name)
        place = changes
        for part in option.path[:-1]:
            place = place.setdefault(part, {})
        try:
            place[option.path[-1]] = option.parse(value, strict=strict)
        except ValueError as error:
            raise OptionError(name, str(error)) from None
    if not isinstance(settings, type):
        return _changed(settings, changes)
    for option in options.values():
        if option.default is NODEFAULT and option.name not in changes:
            raise OptionError(option.name, "is required")
    groups = {name: _changed(field.default, changes[name]) for name, field in _groups(settings) if name in changes}
    return settings(**{**changes, **groups})


def gpu_defaults(settings: Struct, given: Collection[str]) -> dict[str, Any]:
    """Return the defaults where the model computes on a GPU, by name, of the options that are not ``given``."""
    return {
        option.name: option.extra["on_gpu"]
        for option in options_of(settings).values()
        if "on_gpu" in option.extra and option.name not in given
    }


def find_option(options: Mapping[str, Option], name: str) -> Option:
    """Return the option that a user calls ``name``. Raises :class:`UnknownOption`."""
    wanted = name.replace("-", "_")
    if wanted in options:
        return options[wanted]
    for option in options.values():
        if wanted in option.names:
            return option
    raise UnknownOption(name, f"no such option{did_you_mean(wanted, options)}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return ``; did you mean …?`` with up to three similar names, or nothing."""
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _walk(struct: type[Struct], instance: Struct | None, path: tuple[str, ...]) -> Iterator[Option]:
    for field in msgspec.structs.fields(struct):
        default = field.default if instance is None else getattr(instance, field.name)
        place = (*path, field.name)
        if isinstance(default, Struct):
            yield from _walk(type(default), default, place)
            continue
        core, notes, is_optional = _unwrapped(field.type)
        metas = [note for note in notes if isinstance(note, Meta)]
        extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
        for text in notes:
            if isinstance(text, str):
                yield Option(
                    name=extra.get("name", field.name),
                    path=place,
                    group=_group(struct, field.name),
                    annotation=field.type,
                    default=default,
                    text=f"{text} On a GPU by default {extra['on_gpu']}." if "on_gpu" in extra else text,
                    extra=extra,
                    type=tuple if get_origin(core) is tuple else str if _choices(core) else core,
                    is_optional=is_optional,
                    choices=_choices(core) or extra.get("choices", ()),
                    bounds=tuple(f"{sign} {bound}" for meta in metas for sign, bound in _bounds(meta)),
                )


def _bounds(meta: Meta) -> Iterator[tuple[str, float]]:
    """Yield the bounds, whole numbers as such: typing takes an earlier annotation with 0.0 for an equal one with 0."""
    given = ((sign, getattr(meta, key)) for key, sign in _SIGNS.items())
    return ((sign, int(bound) if bound == int(bound) else bound) for sign, bound in given if bound is not None)


def _unwrapped(annotation: Any) -> tuple[Any, list[Any], bool]:
    """Return the plain type, what ``Annotated`` adds to it, and whether None is possible."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        core, notes, is_optional = _unwrapped(parts[0])
        return core, [*notes, *parts[1:]], is_optional
    if type(None) in parts:
        core, notes, _ = _unwrapped(next(part for part in parts if part is not type(None)))
        return core, notes, True
    return annotation, [], False


def _choices(core: Any) -> tuple[str, ...]:
    if isinstance(core, type) and issubclass(core, Enum):
        return tuple(core)
    if get_origin(core) is tuple:
        return _choices(get_args(core)[0])
    return get_args(core) if get_origin(core) is Literal else ()


def _group(struct: type[Struct], name: str) -> str:
    """``StructuredOutputConfig`` → ``Structured output``; for an inherited field by the struct that defines it."""
    owner = next(base for base in reversed(struct.__mro__) if name in vars(base).get("__annotations__", ()))
    words = re.sub(r"(Config|Settings|Options)$", "", owner.__name__)
    return re.sub(r"(?<=[a-z])[A-Z]", lambda match: f" {match[0].lower()}", words)


def _groups(struct: type[Struct]) -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    return ((each.name, each) for each in msgspec.structs.fields(struct) if isinstance(each.default, Struct))


def _changed(instance: _Settings, changes: Mapping[str, Any]) -> _Settings:
    parts = {
        name: _changed(getattr(instance, name), value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return msgspec.structs.replace(instance, **parts)
