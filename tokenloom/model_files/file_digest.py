"""Identifies files by their contents."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

Stamp = tuple[str, int, int, int, int]


def cached_digest(files: Sequence[Path], cache: Path) -> bytes:
    """Return the digest of files, which is kept in the directory ``cache`` by their stamps."""
    stamps = stamps_of(files)
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    entry = cache / key
    try:
        cached = bytes.fromhex(entry.read_text())
        if len(cached) == hashlib.sha256().digest_size:
            return cached
    except (OSError, ValueError):
        pass  # missing or invalid: computed again
    digest = digest_of(files)
    if stamps_of(files) != stamps:
        return digest  # of files that changed while they were read: it is that of neither state
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        draft = entry.with_suffix(f".{digest.hex()[:8]}")
        draft.write_text(digest.hex())
        draft.replace(entry)
    except OSError:
        pass  # in a read-only home the digest is computed at each start
    return digest


def stamps_of(files: Iterable[Path]) -> list[Stamp]:
    """Return what changes with each change of a file: its path, size, times and inode. Tools that copy files keep the
    time of writing, and in some images it is the same for all files. Raises ``OSError``."""
    return [
        # With path, size and time of writing only, two sets of weights had one fingerprint: that which was computed
        # first and kept.
        (str(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        for file in files
        if (stat := file.stat())
    ]


def digest_of(files: Iterable[Path]) -> bytes:
    """Return the SHA-256 of the names and contents of files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.digest()
