"""The HTTP edge: server, bodies, keys, routes and server-sent events."""
