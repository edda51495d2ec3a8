"""The limit of messages between services."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Limit of every channel and server; gRPC's default of 4 MiB is too small for a long prompt."""
