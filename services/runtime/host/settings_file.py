"""Settings from a file: .toml, .json or .yaml, with options at the top or in tables named after their groups."""

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


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
