"""KV blocks that move between engines: other engines, readings under leases, and the ``KVTransfer`` service."""
