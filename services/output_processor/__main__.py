"""Runs the output processor: ``python -m tokenloom.services.output_processor``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .output_processor_settings import OutputProcessorSettings
    from .service import OutputProcessorService

if __name__ == "__main__":
    sys.exit(main(OutputProcessorService, OutputProcessorSettings, OutputProcessorSettings.service))
