"""LoRA adapters of the demo model: ``json`` answers in JSON, ``pirate`` speaks like a pirate."""
