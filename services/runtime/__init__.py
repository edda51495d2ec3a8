"""What every service shares: lifecycle, channels, errors, settings, validation. It knows no service by name."""
