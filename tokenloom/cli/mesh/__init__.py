"""Commands for a local mesh: ``demo``, ``ps``, ``top``, ``scale``, ``plan`` and ``stop``."""
