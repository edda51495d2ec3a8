"""Checks that the packages of the engine are installed, without importing them."""

import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from .refusal import CannotServe

_INSTALL = "pip install 'tokenloom[engine]'"
_CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
_NEEDED = ("torch", "safetensors", "llguidance")


def check_engine_packages() -> None:
    """Raise `CannotServe` unless this environment has the packages with which an engine computes a model."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise CannotServe(
            f"The engine needs {', '.join(missing)}, which this environment lacks: run {_INSTALL} (on a machine "
            f"without a GPU with {_CPU_INDEX})"
        )
    if reason := untested_torch():
        raise CannotServe(f"{reason}: run {_INSTALL}")


def untested_torch() -> str:
    """Return why the installed torch is not one that this release was tested with; empty: it is."""
    bounds, installed = dict(_bounds("torch")), metadata.version("torch")
    version = _numbers(installed)
    lowest, highest = bounds.get(">="), bounds.get("<")
    if lowest is not None and version < _numbers(lowest):
        return f"torch {installed} is older than {lowest}, the oldest version that is supported"
    if highest is not None and version >= _numbers(highest):
        return f"torch {installed} is newer than the versions that this release was tested with (below {highest})"
    return ""


def _bounds(package: str) -> Iterator[tuple[str, str]]:
    """Yield the bounds of the requirement for a package, such as ``(">=", "2.11")``."""
    try:
        requirements = metadata.requires("tokenloom") or []
    except metadata.PackageNotFoundError:  # run from a clone that is not installed
        return
    for requirement in requirements:
        specifiers = requirement.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", specifiers)
        if name is not None and name[0] == package:
            yield from re.findall(r"(>=|<)\s*([\d.]+)", specifiers)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
