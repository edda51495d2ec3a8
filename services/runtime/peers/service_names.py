"""The names of services in their certificates."""

from collections.abc import Iterable

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
