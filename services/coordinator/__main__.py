"""``python -m tokenloom.services.coordinator``"""

import sys

from ..runtime.service import main
from .service import CoordinatorService
from .settings import CoordinatorSettings

if __name__ == "__main__":
    sys.exit(main(CoordinatorService, CoordinatorSettings, CoordinatorSettings.service))
