"""``python -m tokenloom.services.gateway``."""

import sys

from ..runtime.service import main
from .service import GatewayService
from .settings import GatewaySettings

if __name__ == "__main__":
    sys.exit(main(GatewayService, GatewaySettings, "gateway"))
