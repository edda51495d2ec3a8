"""Commands for a local mesh: ``serve``, ``demo``, ``ps`` and ``top``."""
