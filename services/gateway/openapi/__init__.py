"""The HTTP API, described."""
