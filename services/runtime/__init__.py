"""What every service shares: lifecycle, channels, errors, settings, validation. Nothing here knows one service from another."""
