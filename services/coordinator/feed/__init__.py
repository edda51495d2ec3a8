"""Makes what the watchers of the registry are sent."""
