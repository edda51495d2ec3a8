"""KV blocks that move: connectors, leases, loads, transports and the offload tier."""
