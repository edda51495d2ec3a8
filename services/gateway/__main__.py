"""``python -m tokenloom.services.gateway``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .service import GatewayService
    from .settings.gateway_settings import GatewaySettings

if __name__ == "__main__":
    sys.exit(main(GatewayService, GatewaySettings, "gateway"))
