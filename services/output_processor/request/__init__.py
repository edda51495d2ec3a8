"""Runs requests: their samples, the attempts of each on engines, its output."""
