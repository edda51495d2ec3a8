"""Counts the imports that pyright cannot resolve, as an editor would show them when it opens the checkout."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "1.1.405"
"""Run through npx where pyright is not installed; npx needs Node.js."""
_RULES = ("reportMissingImports", "reportMissingModuleSource")
_UNKNOWN_SYMBOL = "is unknown import symbol"
_OURS = re.compile(r'^Import "(tokenloom\b|\.)')
_TIMEOUT_SECONDS = 900.0


class PyrightMissingError(Exception):
    """Raised when pyright cannot be run; the message says why."""


@dataclass(frozen=True)
class Editor:
    """Holds what pyright reports."""

    version: str
    files: int
    """Files that pyright read."""
    unresolved: int
    """Imports that pyright does not find, or finds without their source."""
    unresolved_files: list[str]
    """The files with such imports, with real paths relative to the checkout."""
    unresolved_ours: int
    """How many of them name our own modules."""
    unknown_names: int
    """Names that an import takes from a module that pyright does find, but without that name."""
    errors: int
    """Errors of every kind, these imports included."""


def open_editor(root: Path) -> Editor:
    """Run pyright in the checkout with its own configuration and, where there is one, its environment in ``.venv``.

    Raises ``PyrightMissingError`` when there is no pyright, no npx, or no network to fetch it.
    """
    command = [*_command(root), "--outputjson"]
    python = root / ".venv" / "bin" / "python"
    if python.exists():
        command += ["--pythonpath", str(python)]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
        return summarize(json.loads(done.stdout), root)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PyrightMissingError(f"{command[0]} did not run: {error}") from error
    except (ValueError, KeyError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise PyrightMissingError(f"{command[0]} gave no result: {last[0]}") from error


def summarize(report: Mapping[str, Any], root: Path) -> Editor:
    """Count in pyright's JSON. A diagnostic that pyright reports once for each path of a linked file counts once."""
    seen = {}
    for each in report["generalDiagnostics"]:
        real = Path(each["file"]).resolve()
        file = real.relative_to(root).as_posix() if real.is_relative_to(root) else str(real)
        start = each["range"]["start"]
        seen[file, start["line"], start["character"], each["message"]] = each
    unresolved = {key: each for key, each in seen.items() if each.get("rule") in _RULES}
    return Editor(
        version=str(report["version"]),
        files=int(report["summary"]["filesAnalyzed"]),
        unresolved=len(unresolved),
        unresolved_files=sorted({file for file, *_ in unresolved}),
        unresolved_ours=sum(bool(_OURS.match(each["message"])) for each in unresolved.values()),
        unknown_names=sum(each["message"].endswith(_UNKNOWN_SYMBOL) for each in seen.values()),
        errors=sum(each["severity"] == "error" for each in seen.values()),
    )


def _command(root: Path) -> Sequence[str]:
    own = root / ".venv" / "bin" / "pyright"
    if own.exists():
        return [str(own)]
    if installed := shutil.which("pyright"):
        return [installed]
    if npx := shutil.which("npx"):
        return [npx, "--yes", f"pyright@{VERSION}"]
    raise PyrightMissingError("pyright and npx are not installed")
