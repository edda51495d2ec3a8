"""Names the files of a certificate. Settings hold it, so this module imports neither ssl nor asyncio."""

from dataclasses import dataclass
from pathlib import Path


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
