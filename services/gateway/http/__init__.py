"""The HTTP edge: bodies, keys, endpoints and server-sent events; the server is a folder of its own."""
