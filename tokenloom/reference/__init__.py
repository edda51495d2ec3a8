"""Writes the pages of ``docs/`` that derive from the code: ``python -m tokenloom.reference``."""
