"""Writes the Go package ``tokenloom/gen/tokenloom/v1``, named as by ``buf generate``, and a ``go`` that finds it."""

import shutil
from pathlib import Path

from . import debian
from .protoc import BUILD, PUBLIC, generate

FOLDER = BUILD / "go"
"""A folder for ``GOPATH``."""
PACKAGE = "tokenloom/gen/tokenloom/v1"


def write() -> Path:
    """Write the package and return the program ``go``, which builds against it without a proxy of modules.

    Raises `StubsFailed`.
    """
    root = debian.unpacked()
    shutil.rmtree(FOLDER, ignore_errors=True)
    plugins = [(name, root / "usr/bin" / f"protoc-gen-{name}") for name in ("go", "go-grpc")]
    named = [f"M{proto}={PACKAGE};tokenloomv1" for proto in PUBLIC]
    # Both files are in tokenloom/v1, and the package's path ends with it.
    generate(plugins, ["paths=source_relative", *named], FOLDER / "src" / PACKAGE.removesuffix("/tokenloom/v1"))
    return _program(root)


def _program(root: Path) -> Path:
    variables = {
        "GOROOT": root / f"usr/lib/go-{debian.GO}",
        "GOPATH": f"{FOLDER}:{root / 'usr/share/gocode'}",
        "GOCACHE": BUILD / "go-cache",
        "GO111MODULE": "off",  # else it asks a proxy of modules
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    settings = " ".join(f"{name}='{value}'" for name, value in variables.items())
    program = FOLDER / "bin" / "go"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nexec env {settings} '{variables['GOROOT']}/bin/go' \"$@\"\n")
    program.chmod(0o755)
    return program
