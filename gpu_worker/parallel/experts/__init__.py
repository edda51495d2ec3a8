"""Moves experts between the ranks over which they are spread, so that all ranks are loaded evenly (EPLB)."""
