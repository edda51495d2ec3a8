"""Connects the services of a mesh: addresses, channels, handshake, credit, TLS and permissions."""
