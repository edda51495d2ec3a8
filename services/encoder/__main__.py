"""Runs the encoder: ``python -m tokenloom.services.encoder``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .encoder_settings import EncoderSettings
    from .service import EncoderService

if __name__ == "__main__":
    sys.exit(main(EncoderService, EncoderSettings, EncoderSettings.service))
