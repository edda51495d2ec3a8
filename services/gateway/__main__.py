"""``python -m tokenloom.services.gateway``."""

import logging
import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.request.errors import InvalidArgument
    from tokenloom.services.runtime.host.service import USAGE_ERROR, main

    from .service import GatewayService
    from .settings.gateway_settings import GatewaySettings

log = logging.getLogger(__name__)


def _service(settings: GatewaySettings) -> GatewayService:
    if settings.hold_connections is None:
        return GatewayService(settings)
    from .http.server.connection_holder import start_holder

    try:
        return GatewayService(settings, start_holder(settings.hold_connections, settings.instance_id))
    except (InvalidArgument, OSError) as error:
        log.error("--hold-connections: %s", error.message if isinstance(error, InvalidArgument) else error)
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    sys.exit(main(_service, GatewaySettings, "gateway"))
