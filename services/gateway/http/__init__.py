"""The HTTP edge: server, bodies, keys, endpoints and server-sent events."""
