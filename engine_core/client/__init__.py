"""Clients of an engine core: one for an event loop, over a socket, one that runs the core in the caller's thread."""
