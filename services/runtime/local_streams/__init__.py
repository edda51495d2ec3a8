"""Bidirectional and unary calls between processes of one host over unix sockets of their own, without gRPC's threads.
Servicers, messages and statuses are gRPC's. ``docs/understand/local-streams.md`` describes the protocol."""
