"""Runs the coordinator: ``python -m tokenloom.services.coordinator``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .coordinator_settings import CoordinatorSettings
    from .service import CoordinatorService

if __name__ == "__main__":
    sys.exit(main(CoordinatorService, CoordinatorSettings, CoordinatorSettings.service))
