"""Serves the stream of one gateway: its slots, its credit and its frames."""
