"""Checks the files that options name."""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from .refusal import CannotServe


def check_files(files: Mapping[str, Path]) -> None:
    """Check that each file can be read; keys are the flags that name them. Raises `CannotServe`."""
    for flag, path in files.items():
        try:
            open(os.path.expanduser(path), "rb").close()
        except OSError as error:
            raise CannotServe(
                f"{flag}: {path} cannot be read ({error.strerror}): give the path of an existing file"
            ) from None


def check_directories(directories: Mapping[str, Path]) -> None:
    """Check that each directory can be written, or made; keys are the flags that name them. Raises `CannotServe`."""
    for flag, path in directories.items():
        nearest = next((each for each in (path, *path.absolute().parents) if os.path.exists(each)), path)
        if not os.path.isdir(nearest) or not os.access(nearest, os.W_OK | os.X_OK):
            raise CannotServe(
                f"{flag}: {path} cannot be used, because {nearest} is no directory that this user can write"
            )


def check_certificate(certificate: Path, key: Path) -> None:
    """Check that a certificate and its private key are PEM files that belong together. Raises `CannotServe`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise CannotServe(
            f"{certificate} and {key} are not a certificate and its key in PEM ({reason}): `tokenloom certs` makes "
            "such files"
        ) from None
