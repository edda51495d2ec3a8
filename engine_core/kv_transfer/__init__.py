"""KV blocks that move: connectors, leases, loads, transports, the offload tier, and stores that engines share."""
