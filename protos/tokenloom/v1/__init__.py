"""Generated stubs of the contracts: what a gRPC client imports."""
