"""What every part of the engine's front uses: settings, load, attempts, metrics and the core's requests."""
