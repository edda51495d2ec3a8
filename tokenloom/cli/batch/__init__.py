"""Commands that work through many prompts: ``generate`` and ``run-batch``."""
