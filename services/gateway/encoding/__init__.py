"""Writes JSON and server-sent events as bytes."""
