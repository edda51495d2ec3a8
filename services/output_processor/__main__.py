"""``python -m tokenloom.services.output_processor``."""

import sys

from ..runtime.service import main
from .service import OutputProcessorService
from .settings import OutputProcessorSettings

if __name__ == "__main__":
    sys.exit(main(OutputProcessorService, OutputProcessorSettings, OutputProcessorSettings.service))
