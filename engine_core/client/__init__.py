"""Clients of an engine core: one for an event loop, over ZMQ, and one that runs the core in the caller's thread."""
