"""Unpacks Go, its gRPC library and the plugins of protoc from Debian's packages into a folder; nothing is installed."""

import shutil
from pathlib import Path

from .protoc import BUILD, StubsFailed, run

GO = "1.19"
FOLDER = BUILD / "debian"
LIBRARY = "golang-google-grpc-dev"
PACKAGES = (
    f"golang-{GO}-go",
    f"golang-{GO}-src",
    LIBRARY,
    "golang-google-protobuf-dev",
    "golang-google-genproto-dev",
    "golang-github-golang-protobuf-1-5-dev",
    "golang-golang-x-net-dev",
    "golang-golang-x-sys-dev",
    "golang-golang-x-text-dev",
    "protoc-gen-go",
    "protoc-gen-go-grpc",
)
"""Debian 12's; each that these need is among them."""


def unpacked() -> Path:
    """Return the folder with these packages, which apt fetches the first time. Raises `StubsFailed`."""
    mark = FOLDER / "unpacked"
    wanted = "\n".join(PACKAGES)
    if mark.is_file() and mark.read_text() == wanted:
        return FOLDER
    if (apt := shutil.which("apt-get")) is None:
        raise StubsFailed(f"Go {GO} comes from Debian's packages, and this system has no apt-get")
    shutil.rmtree(FOLDER, ignore_errors=True)
    archives = FOLDER / "archives"
    archives.mkdir(parents=True)
    run([apt, "download", "--quiet", *PACKAGES], archives)
    for archive in archives.glob("*.deb"):
        run(["dpkg-deb", "--extract", str(archive), str(FOLDER)], FOLDER)
        archive.write_bytes(b"")  # its name tells the version
    mark.write_text(wanted)
    return FOLDER


def version(package: str) -> str:
    """Return the version of an unpacked package, without Debian's revision."""
    (archive,) = (unpacked() / "archives").glob(f"{package}_*.deb")
    return archive.name.split("_")[1].replace("%3a", ":").partition("-")[0]
