"""``python -m tokenloom.services.engine``"""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .records.engine_settings import EngineSettings
    from .service import EngineService

if __name__ == "__main__":
    sys.exit(main(EngineService, EngineSettings, EngineSettings.service))
