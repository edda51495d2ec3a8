"""Clients of an engine core: in process or over ZMQ, with an event loop or without."""
