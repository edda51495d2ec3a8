"""Runs a relay: ``python -m tokenloom.services.relay``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .relay_settings import RelaySettings
    from .service import RelayService

if __name__ == "__main__":
    sys.exit(main(RelayService, RelaySettings, RelaySettings.service))
