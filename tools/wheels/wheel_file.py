"""Reads a wheel, and writes one with another tag, other requirements or fewer files."""

import base64
import hashlib
import zipfile
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file in a wheel, so that the same sources give the same bytes."""
_MADE = ("METADATA", "WHEEL", "RECORD")


@dataclass(frozen=True)
class Wheel:
    """The contents of a wheel."""

    metadata: Message
    """Name, version and requirements."""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path."""
    own_files: dict[str, bytes] = field(default_factory=dict)
    """Those of the wheel's own folder, such as its licence, without that folder, and without what is made anew."""
    tag: str = "py3-none-any"

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        """Read a wheel without its tag."""
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        own = next(name.removesuffix("METADATA") for name in contents if name.endswith(".dist-info/METADATA"))
        kept = {name.removeprefix(own): data for name, data in contents.items() if name.startswith(own)}
        return cls(
            Parser().parsestr(contents[f"{own}METADATA"].decode()),
            {name: data for name, data in contents.items() if not name.startswith(own)},
            {name: data for name, data in kept.items() if name not in _MADE},
        )

    @property
    def name(self) -> str:
        """The first two parts of the file's name: ``tokenloom-0.1.0``."""
        return f"{self.metadata['Name'].replace('-', '_')}-{self.metadata['Version']}"

    def write(self, folder: Path) -> Path:
        """Write the wheel with its tag and a record of its files, and return its path."""
        own = f"{self.name}.dist-info/"
        is_pure = str(self.tag.endswith("-any")).lower()
        about = f"Wheel-Version: 1.0\nGenerator: tokenloom\nRoot-Is-Purelib: {is_pure}\nTag: {self.tag}\n"
        named = {**self.own_files, "METADATA": _text(self.metadata).encode(), "WHEEL": about.encode()}
        contents = {**self.files, **{own + name: data for name, data in named.items()}}
        record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in contents.items())
        contents[f"{own}RECORD"] = f"{record}{own}RECORD,,\n".encode()
        path = folder / f"{self.name}-{self.tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in contents.items():
                info = zipfile.ZipInfo(name, _EPOCH)
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(info, data)
        return path


def _text(metadata: Message) -> str:
    # Not `Message.as_bytes`, which takes no text that is not ASCII.
    heads = "".join(f"{name}: {value}\n" for name, value in metadata.items())
    return f"{heads}\n{metadata.get_payload() or ''}"


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
