"""``python -m tokenloom.services.engine``"""

import sys

from ..runtime.service import main
from .service import EngineService
from .settings import EngineSettings

if __name__ == "__main__":
    sys.exit(main(EngineService, EngineSettings, EngineSettings.service))
