"""``python -m tokenloom.services.tokenizer``."""

import sys

from ..runtime.service import main
from .service import TokenizerService
from .settings import TokenizerSettings

if __name__ == "__main__":
    sys.exit(main(TokenizerService, TokenizerSettings, TokenizerSettings.service))
