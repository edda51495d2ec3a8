"""Runs the tokenizer: ``python -m tokenloom.services.tokenizer``."""

import sys

from tokenloom.process.uncollected_imports import uncollected_imports

with uncollected_imports():
    from tokenloom.services.runtime.host.service import main

    from .service import TokenizerService
    from .tokenizer_settings import TokenizerSettings

if __name__ == "__main__":
    sys.exit(main(TokenizerService, TokenizerSettings, TokenizerSettings.service))
