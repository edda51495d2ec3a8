"""The relay: ends gRPC and TLS of clients in a process that outlives gateways."""
