"""The HTTP server: sockets, TLS, connections and the protocol of each."""
