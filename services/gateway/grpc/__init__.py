"""The public gRPC API."""
