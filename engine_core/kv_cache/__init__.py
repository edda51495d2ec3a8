"""The paged KV cache: the block pool, block hashes, prefix hits and the size of the pool."""
