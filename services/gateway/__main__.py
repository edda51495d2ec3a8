"""``python -m tokenloom.services.gateway``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .service import GatewayService
    from .settings.gateway_settings import GatewaySettings


def _service(settings: GatewaySettings) -> GatewayService:
    if settings.hold_connections is None:
        return GatewayService(settings)
    from .http.server.connection_holder import start_holder

    return GatewayService(settings, start_holder(settings.hold_connections))


if __name__ == "__main__":
    sys.exit(main(_service, GatewaySettings, "gateway"))
