"""Writes the pages about the gRPC contracts: every service, method, message, field and value, with its comment.

Reading the protos needs ``grpcio-tools``, which the development tools include.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

_FOLDER = "tokenloom/v1"


@dataclass(frozen=True)
class ProtoFile:
    """Holds a proto file and its comments."""

    descriptor: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]
    """The comment above a declaration, by its path in the descriptor (``SourceCodeInfo.Location.path``)."""

    @property
    def path(self) -> str:
        """The file's path below ``protos/``."""
        return self.descriptor.name

    def comment(self, *path: int) -> str:
        """Return a declaration's comment on one line; empty if it has none."""
        return self.comments.get(path, "")


def read_protos() -> Sequence[ProtoFile]:
    """Return the proto files of the package, sorted by path.

    Raises:
        subprocess.CalledProcessError: The compiler refuses a file, or ``grpcio-tools`` is not installed.
    """
    root = Path(str(resources.files("tokenloom"))).parent
    names = sorted(str(path.relative_to(root)) for path in (root / _FOLDER).rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "protos.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={output}", *names], cwd=root, check=True)
        files = FileDescriptorSet.FromString(output.read_bytes()).file
    return [ProtoFile(each, _comments(each)) for each in files]


def _comments(file: FileDescriptorProto) -> Mapping[tuple[int, ...], str]:
    return {
        tuple(location.path): " ".join(location.leading_comments.split())
        for location in file.source_code_info.location
        if location.leading_comments
    }


_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
"""Numbers of the fields of FileDescriptorProto, which begin the path of a declaration."""
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
"""Numbers of the fields of DescriptorProto."""
_METHODS, _VALUES = 2, 2

_OVERVIEW = """# gRPC

`make docs` writes these pages from `protos/`. A mesh offers `tokenloom.v1.Inference` and the Open Inference Protocol to
its clients, and uses the other services between its parts. Every service also offers `grpc.health.v1.Health` and
reflection. `tokenloom.v1` holds the Python stubs; [clients](../../use/clients.md) shows a client.

| service | page | what it does |
|---|---|---|
"""


def pages(files: Sequence[ProtoFile]) -> Mapping[str, str]:
    """Return the pages by file name."""
    writer = _Writer(files)
    return {"index.md": _overview(files), **{page_of(file): writer.page(file) for file in files}}


def page_of(file: ProtoFile) -> str:
    """Return the name of a proto file's page."""
    return PurePath(file.path).stem.replace("_", "-") + ".md"


def _overview(files: Sequence[ProtoFile]) -> str:
    rows = [
        f"| `{file.descriptor.package}.{service.name}` | [{PurePath(file.path).name}]({page_of(file)}) "
        f"| {_cell(file.comment(_SERVICES, number))} |\n"
        for file in files
        for number, service in enumerate(file.descriptor.service)
    ]
    shared = [file for file in files if not file.descriptor.service]
    links = ", ".join(f"[{PurePath(file.path).name}]({page_of(file)})" for file in shared)
    return f"{_OVERVIEW}{''.join(rows)}\nMessages that several services share: {links}.\n"


class _Writer:
    """Writes pages whose types are links to their sections, on whichever page they are."""

    def __init__(self, files: Sequence[ProtoFile]) -> None:
        self._homes = {name: page_of(file) for file in files for name in _type_names(file)}

    def page(self, file: ProtoFile) -> str:
        """Return the page of a proto file."""
        descriptor = file.descriptor
        lines = [f"# {PurePath(file.path).name}\n", f"Package `{descriptor.package}`, from `protos/{file.path}`.\n"]
        for number, service in enumerate(descriptor.service):
            path = (_SERVICES, number)
            lines += [f"## Service {service.name}\n", file.comment(*path) + "\n", "| method | request | response | |"]
            lines.append("|---|---|---|---|")
            lines += [
                self._method(file, method, (*path, _METHODS, index)) for index, method in enumerate(service.method)
            ]
            lines.append("")
        lines.append("## Messages\n" if descriptor.message_type else "")
        for number, message in enumerate(descriptor.message_type):
            lines += self._message(file, message, (_MESSAGES, number), message.name)
        lines.append("## Enumerations\n" if descriptor.enum_type else "")
        for number, enum in enumerate(descriptor.enum_type):
            lines += _enum(file, enum, (_ENUMS, number), enum.name)
        return "\n".join(line for line in lines if line is not None).rstrip() + "\n"

    def _method(self, file: ProtoFile, method: MethodDescriptorProto, path: tuple[int, ...]) -> str:
        home = page_of(file)
        asked = ("stream " if method.client_streaming else "") + self._link(method.input_type, home)
        answered = ("stream " if method.server_streaming else "") + self._link(method.output_type, home)
        return f"| `{method.name}` | {asked} | {answered} | {_cell(file.comment(*path))} |"

    def _message(self, file: ProtoFile, message: DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield f"### {name}\n"
        if comment := file.comment(*path):
            yield comment + "\n"
        if message.field:
            yield "| field | type | |\n|---|---|---|"
        for number, field in enumerate(message.field):
            yield self._field(file, message, field, (*path, _FIELDS, number))
        yield ""
        for number, nested in enumerate(message.nested_type):
            yield from self._message(file, nested, (*path, _NESTED, number), f"{name}.{nested.name}")
        for number, enum in enumerate(message.enum_type):
            yield from _enum(file, enum, (*path, _NESTED_ENUMS, number), f"{name}.{enum.name}")

    def _field(
        self, file: ProtoFile, message: DescriptorProto, field: FieldDescriptorProto, path: tuple[int, ...]
    ) -> str:
        kind = self._kind(message, field, page_of(file))
        text = file.comment(*path)
        if field.HasField("oneof_index") and not field.proto3_optional:
            text += f" One of `{message.oneof_decl[field.oneof_index].name}`."
        return f"| `{field.name}` | {kind} | {_cell(text.strip())} |"

    def _kind(self, message: DescriptorProto, field: FieldDescriptorProto, home: str) -> str:
        entry = next((each for each in message.nested_type if field.type_name.endswith(f".{each.name}")), None)
        if entry is not None and entry.options.map_entry:
            return f"map of {self._kind(entry, entry.field[0], home)} to {self._kind(entry, entry.field[1], home)}"
        label = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
        label = "optional " if field.proto3_optional else label
        name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        return label + (self._link(field.type_name, home) if field.type_name else name)

    def _link(self, full_name: str, home: str) -> str:
        name = full_name.removeprefix(".")
        short = name.removeprefix("tokenloom.v1.").removeprefix("inference.").removeprefix("vllm.grpc.engine.")
        if name not in self._homes:
            return f"`{name}`"
        page = "" if self._homes[name] == home else self._homes[name]
        return f"[{short}]({page}#{short.lower().replace('.', '')})"


def _enum(file: ProtoFile, enum: EnumDescriptorProto, path: tuple[int, ...], name: str) -> Iterator[str]:
    yield f"### {name}\n"
    if comment := file.comment(*path):
        yield comment + "\n"
    yield "| value | number | |\n|---|---|---|"
    for number, value in enumerate(enum.value):
        yield f"| `{value.name}` | {value.number} | {_cell(file.comment(*path, _VALUES, number))} |"
    yield ""


def _type_names(file: ProtoFile) -> Iterator[str]:
    package = file.descriptor.package
    yield from (f"{package}.{enum.name}" for enum in file.descriptor.enum_type)
    for message in file.descriptor.message_type:
        yield from _names_within(f"{package}.{message.name}", message)


def _names_within(name: str, message: DescriptorProto) -> Iterator[str]:
    yield name
    yield from (f"{name}.{enum.name}" for enum in message.enum_type)
    for nested in message.nested_type:
        yield from _names_within(f"{name}.{nested.name}", nested)


def _cell(text: str) -> str:
    """Return a comment as the cell of a table."""
    return text.replace("|", "\\|")
