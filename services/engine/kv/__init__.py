"""KV blocks of other engines: where they are, leases, transfers and the ``KVTransfer`` service."""
