"""Commands that talk to a server: ``chat`` and ``complete``."""
