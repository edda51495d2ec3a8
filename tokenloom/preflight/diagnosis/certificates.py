"""Examines the certificates of a mesh."""

import datetime
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding

_SOON = datetime.timedelta(days=7)


def examine_certificates(folder: Path, now: datetime.datetime | None = None) -> Iterator[Finding]:
    """Yield a finding for each certificate in a folder and its folders; ``now`` is by default the time."""
    from cryptography import x509  # imported here: it costs time

    now = now or datetime.datetime.now(datetime.UTC)
    files = sorted(folder.rglob("*.crt"))
    if not files:
        yield Finding("ok", "certificates", f"none in {folder}; a mesh on one machine needs none")
    for file in files:
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except (OSError, ValueError) as error:
            yield Finding("fail", "certificates", f"{file} cannot be read ({error}): run `tokenloom certs`")
            continue
        yield _about(file, certificate.not_valid_before_utc, certificate.not_valid_after_utc, now)


def _about(file: Path, begin: datetime.datetime, end: datetime.datetime, now: datetime.datetime) -> Finding:
    if now < begin:
        return Finding("fail", "certificates", f"{file} is valid from {begin:%Y-%m-%d %H:%M} UTC on: set the clock")
    if now >= end:
        return Finding("fail", "certificates", f"{file} expired on {end:%Y-%m-%d}: renew it with `tokenloom certs`")
    if end - now < _SOON:
        return Finding("warn", "certificates", f"{file} expires on {end:%Y-%m-%d}: renew it with `tokenloom certs`")
    return Finding("ok", "certificates", f"{file} is valid until {end:%Y-%m-%d}")
