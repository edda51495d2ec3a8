"""Describes where the parts of a mesh are, and the names of its model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import parse_member
from tokenloom.services.runtime.host.options import read_file
from tokenloom.services.runtime.host.service_settings import check_address

from .gateway_settings import GatewaySettings

MAX_MESHES = 64


class MeshSpec(Struct, frozen=True, kw_only=True):
    """Describes one mesh as the gateway's options and the file ``--meshes`` do.

    Attributes:
        names: The model's names for clients; empty: the name that the tokenizers serve.
        tokenizers, output_processors: Addresses, or DNS names that stand for several.
        coordinator: Its address.
    """

    names: tuple[str, ...]
    tokenizers: tuple[str, ...]
    output_processors: tuple[str, ...]
    coordinator: str


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A table ``[[mesh]]`` of the file. A list may be written as one text."""

    served_model_name: tuple[str, ...] | str
    tokenizers: tuple[str, ...] | str
    output_processors: tuple[str, ...] | str
    coordinator: str


def mesh_specs(settings: GatewaySettings) -> list[MeshSpec]:
    """Return the mesh of the options, and those of the file ``--meshes``.

    Raises ``InvalidArgument`` for a file that is wrong, or a name that two meshes have.
    """
    first = MeshSpec(
        names=settings.served_model_name,
        tokenizers=settings.tokenizers,
        output_processors=settings.output_processors,
        coordinator=settings.coordinator,
    )
    if settings.meshes is None:
        return [first]
    specs = [first, *_in_file(settings.meshes)]
    if len(specs) > MAX_MESHES:
        raise _wrong(f"{len(specs)} meshes; at most {MAX_MESHES} can stand behind one gateway")
    names = [name for spec in specs for name in spec.names]
    for name in names:
        if names.count(name) > 1:
            raise _wrong(f"the model name {name!r} is given twice")
    return specs


def _in_file(path: Path) -> Iterator[MeshSpec]:
    try:
        values = read_file(path)
    except ValueError as error:
        raise _wrong(str(error).removeprefix("--config: ")) from None
    tables = values.pop("mesh", None)
    if values or not isinstance(tables, list) or not tables:
        raise _wrong(f"{path.name} must hold tables [[mesh]] only")
    for number, table in enumerate(tables, start=1):
        yield _read(number, table)


def _read(number: int, table: object) -> MeshSpec:
    if isinstance(table, Mapping):
        table = {str(name).replace("-", "_"): value for name, value in table.items()}
    try:
        entry = msgspec.convert(table, _Entry)
        names = _items(entry.served_model_name)
        if not all(names):
            raise ValueError("served_model_name must hold at least one name")
        return MeshSpec(
            names=names,
            tokenizers=_members(entry.tokenizers, "tokenizers"),
            output_processors=_members(entry.output_processors, "output_processors"),
            coordinator=check_address(entry.coordinator),
        )
    except InvalidArgument as error:
        raise _wrong(f"mesh {number}: {error.message}") from None
    except ValueError as error:  # msgspec's errors too
        raise _wrong(f"mesh {number}: {error}") from None


def _members(given: tuple[str, ...] | str, field: str) -> tuple[str, ...]:
    return tuple(parse_member(address, field=field) for address in _items(given))


def _items(given: tuple[str, ...] | str) -> tuple[str, ...]:
    """Return the items of a list; one text stands for a list with commas."""
    parts: Any = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts)


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"--meshes: {message}", "meshes")
