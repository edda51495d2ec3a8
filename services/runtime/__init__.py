"""What every service shares: lifecycle, settings, channels, local streams, logs, metrics and traces."""
