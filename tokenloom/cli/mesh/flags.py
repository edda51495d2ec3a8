"""From the command's options to what services are told."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import typer

from tokenloom import checkpoint
from tokenloom.request.errors import TokenloomError


def flags(**values: object) -> tuple[str, ...]:
    """``max_model_len=512`` → ``--max-model-len 512``; None and False are left out, True is a bare flag."""
    parts: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        parts.append("--" + name.replace("_", "-"))
        if value is not True:
            parts.append(str(value.value if isinstance(value, Enum) else value))
    return tuple(parts)


def setting_flags(settings: Mapping[str, object]) -> tuple[str, ...]:
    """The same for settings that were all given: False is a flag of its own, ``--no-strict``, a list is joined."""
    parts: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            parts.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            parts.append(f"--{flag}={text}")  # a value may begin with a dash
    return tuple(parts)


def model_directory(model: str, served_name: str | None) -> tuple[Path, str]:
    """The checkpoint's directory and the name it is served as; exits with a usage error when there is none."""
    try:
        path = checkpoint.resolve(model)
    except TokenloomError as error:
        raise typer.BadParameter(error.message, param_hint="MODEL") from None
    return path, served_name or checkpoint.served_name(path, model)


def check_engines(engines: int | None, prefill: int | None, decode: int | None) -> None:
    """Exits with a usage error unless engines are of one kind, and none of the pair is missing."""
    if (prefill is None) != (decode is None):
        raise typer.BadParameter("each needs the other", param_hint="--prefill, --decode")
    if engines is not None and prefill is not None:
        raise typer.BadParameter("excludes --prefill and --decode", param_hint="--engines")
