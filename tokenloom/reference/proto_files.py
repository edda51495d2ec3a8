"""Reads the protos with their comments. Needs ``grpcio-tools``, which the development tools include."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

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
