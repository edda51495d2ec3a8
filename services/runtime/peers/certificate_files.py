"""Names the files of a certificate. Settings hold it, so this module imports neither ssl nor asyncio."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DOMAIN = "tokenloom.internal"


def dns_name(service: str) -> str:
    """Return the name in the certificate of a service, of an ``operator``, of the ``planner`` or of ``prometheus``."""
    return f"{service.replace('_', '-')}.{DOMAIN}"


def service_of(names: Iterable[str]) -> str | None:
    """Return the service that these DNS names of a certificate belong to; None for one from outside the mesh."""
    for name in names:
        service, dot, domain = name.partition(".")
        if dot and domain == DOMAIN:
            return service.replace("-", "_")
    return None


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of a certificate and its key, in PEM.

    Attributes:
        ca: Certificates of the authorities that peers must have theirs from; None: peers need no certificate.
        field: The option to name in errors.
    """

    ca: Path | None
    cert: Path
    key: Path
    field: str = "tls_cert"

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.cert, self.key) if self.ca is None else (self.ca, self.cert, self.key)

    @property
    def names(self) -> str:
        """Return the files' names for a message, without their folder."""
        *first, last = (path.name for path in self.paths)
        return f"{', '.join(first)} and {last}"
